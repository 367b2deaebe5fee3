"""All ports by name."""

from ports import generators, images, language

PORTS = {port.name: port for port in (*language.PORTS, *images.PORTS, *generators.PORTS)}
