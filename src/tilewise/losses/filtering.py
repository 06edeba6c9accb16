"""What `TileOptions.filter_tolerance` leaves out of backward, on request."""

from tilewise.ops.filter_report import FilterReport, record_filtering

__all__ = ["FilterReport", "record_filtering"]
