"""What `TileOptions.filter_tolerance` leaves out of backward, on request."""

from tilewise.ops.filtered import FilterReport, record_filtering

__all__ = ["FilterReport", "record_filtering"]
