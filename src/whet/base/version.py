"""The version of whet."""

VERSION = "0.1.0"
