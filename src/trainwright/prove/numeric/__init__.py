"""The second executor: all ranks of a Program in one process, in float64, with numpy alone.

It reads the same actions as the engine and shares none of its mathematics: segments, optimizer, exchanges, and the cutting of parameters
are written anew here, so that a fault would have to be made twice to go unseen. Slow and small on purpose. Left out: dropout, every
format but float64, devices.

A family is a module of this folder with
    NAME                            the family's name, as `model.family` gives it
    forward(segment, call, inputs)  what the segment writes; what backward needs beside kept buffers goes under "saved"
    backward(segment, call, inputs) gradients of its inputs; those of its parameters are added to `call.gradients`
    num_valid(samples)              how much a microbatch counts in the mean that the loss is
"""

from __future__ import annotations

from trainwright.registry import Registry

MATHEMATICS = Registry("trainwright.prove.numeric", "model family of the numpy interpreter")
