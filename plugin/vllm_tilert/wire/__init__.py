"""What the prefill connector, the decode node and the router say to each other.

Standard library only: the router imports this package and nothing else of `vllm_tilert`.

`control`  the TCP messages between a sender (prefill) and a decode node
`api`      paths, states and error codes of the decode node's HTTP interface
`address`  hosts, ports and the allow-list
`notify`   word to systemd
"""
