"""The prefill side: a vLLM KV connector that hands finished prefills to TileRT decode nodes.

`config`     what kv_connector_extra_config may say
`scheduler`  which requests are claimed and what each step makes final; no I/O
`plan`       what the scheduler side tells the worker side, step by step
`steps`      what of the worker side runs on vLLM's forward thread: next to nothing
`worker`     gathers what became final into staging memory and passes it on
`sender`     one handoff on the wire, from connect to verdict
`metrics`    what is counted
`connector`  the class vLLM loads; with `register`, the only module that imports vLLM
"""
