"""The units of a model of layers, and what they consist of."""

from parallel3d.fsdp.inspect import units_of


def units(model):
    """The modules whose methods set something on every unit, one by one."""
    return [*model.layers, model]


def on_every_unit(model, method, *args, **kwargs):
    for module in units(model):
        getattr(module, method)(*args, **kwargs)


def buckets(model):
    return [bucket for unit in units_of(model, True) for bucket in unit.group.buckets]
