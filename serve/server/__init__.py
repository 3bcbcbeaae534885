"""The HTTP server: its process, connections, routes and logs."""
