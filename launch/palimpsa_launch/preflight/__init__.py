"""What every node of a job is asked before it trains: a bad one is named and left out, not found out hours later.

`settings` has the bounds, `facts` what a node finds out about itself, `allreduce` how fast nodes add up together,
`meeting` how the head node gathers all of it, `verdict` what is wrong.
"""
