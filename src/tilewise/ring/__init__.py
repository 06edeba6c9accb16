"""Ring communication: moves blocks of columns around a process group. Contains no scores and no losses."""
