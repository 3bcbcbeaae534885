"""Chat, whatever protocol it is asked for in: from messages to a request, from output to events."""
