"""How long kernels, collectives and whole steps take: one model for recomputation and step times.

`classes` says of an operator which kernels it runs, `products` what a matrix product computes once
it is cut into tiles, `table` holds the efficiencies (data, with their sources), `seconds` prices
the operators of a trace on a card, `collectives` what ranks exchange, `timeline` lets host and
streams wait for each other, `step` sums it up.
"""
