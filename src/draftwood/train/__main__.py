"""``torchrun --nproc-per-node 2 -m draftwood.train --method eagle3 --config my.toml``"""

from __future__ import annotations

import sys

from draftwood.train.loop import main

sys.exit(main())
