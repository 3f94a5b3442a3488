"""Stored measurements: tables of the package and files of the user's cache."""
