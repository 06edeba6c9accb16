"""Drop-ins: one module per library, with the names and signatures of that library. No library is patched."""
