"""Chat for every protocol: from messages to a request, and from output to events."""
