"""Timelines of hand-offs, for operators: built from the notes that the layers below emit, and imported by none of them."""
