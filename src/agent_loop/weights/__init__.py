"""The way of new weights from a trainer into the processes of engines."""
