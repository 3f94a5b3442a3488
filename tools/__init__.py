"""What judges the package and is no part of it: it imports the package, which never imports it."""
