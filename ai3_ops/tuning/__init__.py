"""`ai3_ops.tune`: the choice of algorithms by measurement."""

from ai3_ops.tuning.settings import Interrupted as Interrupted
