"""A door: the records and enumerations of model.bin. See `colibri.format.spec`."""

from colibri.format.spec import *  # noqa: F403
