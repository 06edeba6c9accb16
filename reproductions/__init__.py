"""Reproductions of tables and figures from papers. `reproductions/README.md` lists them with their commands."""
