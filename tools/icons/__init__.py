"""Makes the icon sets: fetch pinned packages, render, clean the captions, split, pack."""
