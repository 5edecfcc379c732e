"""How fast a transport moves paged bytes, beside the plainest way to move as many."""
