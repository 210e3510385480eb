"""Model families: a model as segments, parameters and activations. One file a family.

A family is a module with
    NAME                     its name, as `model.family` gives it
    describe(model, local)   the Family as one rank sees it
"""

from __future__ import annotations

from trainwright.registry import Registry

FAMILIES = Registry("trainwright.spec.families", "model family")
