"""Chat templates and tool parsers: messages to tokens and back."""
