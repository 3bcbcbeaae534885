"""Chat for all APIs: convert messages to an engine request, and the output to chat events."""
