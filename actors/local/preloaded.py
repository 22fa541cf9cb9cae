"""What the fork server does once before it forks children, so that none of them does it again."""

from __future__ import annotations

import gc

from actors.runtime.code_digest import digest_of_sources

digest_of_sources()  # of the sources that the children run
gc.freeze()  # else each child's collections would copy the objects of all imports
