"""How instances make themselves known: the registration message, announcer, listener and registry."""
