"""Where the icons come from: packages pinned to a version and a checksum, and the terms of each.

A family is taken only if its licence is in ``PERMISSIVE``. Remix Icon (npm) is not: since January 2026 it
has a licence of its own that limits redistribution.
"""

from __future__ import annotations

from dataclasses import dataclass

PERMISSIVE = ("MIT", "ISC", "Apache-2.0", "BSD-3-Clause", "CC0-1.0", "Unlicense")

# Left out of the large set although Iconify lists them as permissive, for caution: the artwork has, or may
# have, other terms than the code around it.
DOUBTFUL = {
    "vscode-icons": "artwork under CC BY-SA",
    "la": "Icons8 artwork under its own Good Boy licence",
    "icons8": "Icons8 artwork under its own Good Boy licence",
    "wpf": "Icons8 artwork under its own Good Boy licence",
    "flat-color-icons": "Icons8 artwork under its own Good Boy licence",
    "uil": "IconScout's own licence",
    "uim": "IconScout's own licence",
    "uis": "IconScout's own licence",
    "uit": "IconScout's own licence",
    "fxemoji": "artwork and code under different terms",
    "ginetex": "registered care symbols",
}


@dataclass(frozen=True)
class Package:
    """One npm package."""

    npm: str
    version: str
    sha512: str  # as npm writes it, base64

    @property
    def spec(self) -> str:
        """What npm is asked for."""
        return f"{self.npm}@{self.version}"


@dataclass(frozen=True)
class Family:
    """One family of the set that ships."""

    key: str
    title: str
    licence: str
    author: str
    url: str
    package: Package
    licence_file: str
    folders: tuple[tuple[str, str], ...]  # (folder in the package, style of what is in it)
    suffixes: tuple[str, ...] = ()  # endings of a name that say how the icon is drawn, not what it shows


SIZES = ("12", "16", "20", "24", "32", "48", "96")

# In this order in the pack.
FAMILIES = (
    Family(
        "mdi",
        "Material Design Icons",
        "Apache-2.0",
        "Pictogrammers",
        "https://pictogrammers.com/library/mdi/",
        Package(
            "@mdi/svg",
            "7.4.47",
            "WQ2gDll12T9WD34fdRFgQVgO8bag3gavrAgJ0frN4phlwdJARpE6gO1YvLEMJR0KKgoc+/Ea/A0Pp11I00xBvw==",
        ),
        "LICENSE",
        (("svg", ""),),
        ("outline", "variant", "variant-outline"),
    ),
    Family(
        "tabler",
        "Tabler Icons",
        "MIT",
        "Paweł Kuna",
        "https://tabler.io/icons",
        Package(
            "@tabler/icons",
            "3.51.0",
            "0pinvPZz7YeX+OSfxuEAbnEPWbocVXW5iU8h5lh41pYG8sZuQfpWECC980lxOT0clGIcNGn8xsBr+zKaRGdA/g==",
        ),
        "LICENSE",
        (("icons/outline", ""), ("icons/filled", "filled")),
    ),
    Family(
        "phosphor",
        "Phosphor Icons",
        "MIT",
        "Phosphor Icons",
        "https://phosphoricons.com",
        Package(
            "@phosphor-icons/core",
            "2.1.1",
            "v4ARvrip4qBCImOE5rmPUylOEK4iiED9ZyKjcvzuezqMaiRASCHKcRIuvvxL/twvLpkfnEODCOJp5dM4eZilxQ==",
        ),
        "LICENSE",
        tuple(
            (f"assets/{style}", "" if style == "regular" else style)
            for style in ("regular", "bold", "duotone", "fill", "light", "thin")
        ),
        ("bold", "duotone", "fill", "light", "thin"),
    ),
    Family(
        "bootstrap",
        "Bootstrap Icons",
        "MIT",
        "The Bootstrap Authors",
        "https://icons.getbootstrap.com",
        Package(
            "bootstrap-icons",
            "1.13.2",
            "fAU1Ly3dH7hwRg+CB8EZ0Vl0fF80zgXHeUVJyfUOKzoURr+TbwISbCW5tKUoQLERaWYG2emTCybcPbD96hdD1A==",
        ),
        "LICENSE",
        (("icons", ""),),
        ("fill",),
    ),
    Family(
        "carbon",
        "Carbon Icons",
        "Apache-2.0",
        "IBM",
        "https://carbondesignsystem.com/elements/icons/library/",
        Package(
            "@carbon/icons",
            "11.89.0",
            "M54u+J19d+nUSp2mpRqc1Opcsqx/bv5oLLk8ECVwE0PGWmUiUlJkfl6NbWHcA2pOIyvJoEwv686KsCO1Q7RSlQ==",
        ),
        "LICENSE",
        (("svg/32", ""),),
        ("filled", "fill", "outline", "alt", "alt-filled", "glyph", "solid", "01", "02", "03", "04"),
    ),
    Family(
        "iconoir",
        "Iconoir",
        "MIT",
        "Luca Burgio",
        "https://iconoir.com",
        Package(
            "iconoir",
            "7.12.1",
            "7ei4jd1bss0Ukyz/bbM9Zc96aLfZuwTEkSW8u5fx5h3X9912MsnmWwPw9LyTUtcf0ShfTzQeQ9oG7IslW3hrLg==",
        ),
        "LICENSE",
        (("icons/regular", ""), ("icons/solid", "solid")),
    ),
    Family(
        "ionicons",
        "Ionicons",
        "MIT",
        "Ionic",
        "https://ionic.io/ionicons",
        Package(
            "ionicons",
            "8.1.0",
            "XSM2gYWTXxSYTwjmKWAoy4yR7AbAFDjpc5ZIivAiGXskM0fe5CdMPfs6InQRUcrYtVb2WZ/0HQ1/jeh3JW78SA==",
        ),
        "LICENSE",
        (("dist/svg", ""),),
        ("outline", "sharp"),
    ),
    Family(
        "heroicons",
        "Heroicons",
        "MIT",
        "Tailwind Labs, Inc.",
        "https://heroicons.com",
        Package(
            "heroicons",
            "2.2.0",
            "yOwvztmNiBWqR946t+JdgZmyzEmnRMC2nxvHFC90bF1SUttwB6yJKYeme1JeEcBfobdOs827nCyiWBS2z/brog==",
        ),
        "LICENSE",
        (("24/outline", ""), ("24/solid", "solid"), ("20/solid", "20-solid"), ("16/solid", "16-solid")),
    ),
    Family(
        "octicons",
        "Octicons",
        "MIT",
        "GitHub Inc.",
        "https://primer.style/octicons",
        Package(
            "@primer/octicons",
            "19.42.0",
            "MEcHxVxNHu1I2Ndk5Mcwp7tfBiDk/EpytDJgKOfE2ldqIczWucVrZNeNU4wtEN5mnNudZ0YL5G0spax3bSMT4w==",
        ),
        "LICENSE",
        (("build/svg", ""),),
        (*SIZES, *(f"fill-{size}" for size in SIZES)),
    ),
    Family(
        "lucide",
        "Lucide",
        "ISC",
        "Lucide Icons and Contributors; Cole Bemis (icons from Feather, MIT)",
        "https://lucide.dev",
        Package(
            "lucide-static",
            "1.62.0",
            "WBZA/m2PvkFpMGHDtsBck5P2A9G4ehLlYu4GwwICcmEm1BvYVgj00lCDxKRWLlbMlOibLaiwdQ88G5pHkSWgwA==",
        ),
        "LICENSE",
        (("icons", ""),),
    ),
)
# Held out of training. See docs/concepts/icons.md for why this one.
TEST_FAMILY = "lucide"

ICONIFY = Package(
    "@iconify/json",
    "2.2.535",
    "nAV60ACUSHwnsb6fsp+letHlNkrwO4vzBtcC6B4EDHErQQfezk7E3nJdnwJjve6OCfMNO0uVT5Vrgna9/NCmXw==",
)
# Families that come with tags, by their prefix in Iconify, which has none.
ICONIFY_TAGS = {
    "mdi": "mdi",
    "tabler": "tabler",
    "ph": "phosphor",
    "carbon": "carbon",
    "ion": "ionicons",
    "octicon": "octicons",
    "lucide": "lucide",
}
# Endings that Iconify does not declare, by its prefix.
ICONIFY_SUFFIXES = {
    "mdi": ("outline", "variant", "variant-outline"),
    "tabler": ("filled",),
    "bi": ("fill",),
    "carbon": ("filled", "fill", "outline", "alt", "alt-filled", "glyph", "solid", "01", "02", "03", "04"),
    "octicon": (*SIZES, *(f"fill-{size}" for size in SIZES)),
}
