"""What happened, for people: timelines of hand-offs, from the notes that the layers below emit."""
