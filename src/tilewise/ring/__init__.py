"""Which blocks meet: moves blocks of columns around a process group. Knows no score and no loss."""
