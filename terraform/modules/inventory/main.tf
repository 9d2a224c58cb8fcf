locals {
  # Every group always exists, so that a play never meets an undefined one.
  groups = ["prefill", "decode", "router", "ingress", "native", "observability"]

  hosts = {
    for name, node in var.nodes : name => merge(
      {
        ansible_host   = node.address
        address        = node.address
        fabric_address = coalesce(node.fabric_address, node.address)
        rdma_devices   = node.rdma_devices
        gpus           = node.gpus
        shape          = node.shape
      },
      node.vars,
    )
  }
}
