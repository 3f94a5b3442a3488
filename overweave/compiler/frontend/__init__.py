"""An author's kernel as read, from its source up to the rectangles that tiles touch and whether annotations hold."""
