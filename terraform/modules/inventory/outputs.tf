output "inventory" {
  description = "Groups, their hosts, each host's Ansible variables: `{prefill = {\"prefill-1\" = {ansible_host = ..., address = ..., fabric_address = ..., rdma_devices = [...], gpus = 8, shape = ...}}, ...}`."
  value = {
    for group in local.groups : group => {
      for name, node in var.nodes : name => local.hosts[name] if node.role == group || contains(node.also, group)
    }
  }
}
