"""Files from hostile hands, and the limits that they are held against."""
