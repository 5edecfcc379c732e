"""The pure core: addresses, messages, layouts, plans and lifecycle tables. No sockets, threads, clocks, files or torch."""
