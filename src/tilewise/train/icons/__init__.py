"""Icons with their names: the image-text data that ships with tilewise, and its loader."""

from tilewise.train.icons.iconset import IconFamily, IconSet, load_icons

__all__ = ["IconFamily", "IconSet", "load_icons"]
