"""The decode node: receives attention state into slots it owns, and decodes one request at a time.

`slots`     who may write, read and decode; a state machine without IO
`node`      slots, memory, engine and time put together
`receiver`  the control port: admission, verification, verdicts
`http`      the HTTP interface
`engines`   what decodes: reference (transformers) or tilert
`server`    start, readiness and stop of the whole
"""
