"""An author's kernel as read: directives, names, language, and whether the annotations hold."""
