"""Drop-ins: one file per outside library, with that library's names and signatures. Nothing foreign is patched."""
