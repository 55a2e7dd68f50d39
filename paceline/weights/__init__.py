"""Moving weights from a trainer to engines."""
