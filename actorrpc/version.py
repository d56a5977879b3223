"""The package's version, for the package and for what workers tell each other when they meet."""

VERSION = "0.1.0"
