variable "nodes" {
  description = <<-EOT
    Every host of the cluster by its name. `role` is the group the host serves in, `also` further groups it carries
    (a router host that is the ingress too). `address` is where services listen, `fabric_address` where handoffs
    arrive (null: the same), `rdma_devices` the NICs of the fabric as the kernel names them, `shape` a key of
    modules/catalog or a site's own name. `vars` are added to the host's Ansible variables as they are.
  EOT
  type = map(object({
    role           = string
    address        = string
    fabric_address = optional(string)
    rdma_devices   = optional(list(string), [])
    gpus           = optional(number, 0)
    shape          = optional(string, "custom")
    also           = optional(set(string), [])
    vars           = optional(map(string), {})
  }))
  nullable = false

  validation {
    condition     = length([for node in var.nodes : node if node.role == "decode"]) > 0
    error_message = "nodes: no host has role \"decode\". Add at least one decode host."
  }

  validation {
    condition     = length([for node in var.nodes : node if node.role == "prefill"]) > 0
    error_message = "nodes: no host has role \"prefill\". Add at least one prefill host."
  }

  validation {
    condition = alltrue([
      for name in keys(var.nodes) : can(regex("^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$", name))
    ])
    error_message = format("nodes: %s cannot be host names. Use lower-case letters, digits, hyphens and dots, at most 63 characters.",
    join(", ", [for name in keys(var.nodes) : jsonencode(name) if !can(regex("^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$", name))]))
  }

  validation {
    condition     = alltrue([for node in var.nodes : contains(local.groups, node.role)])
    error_message = format("nodes: unknown role in %s. Use one of %s.", join(", ", [for name, node in var.nodes : "${name}.role = ${jsonencode(node.role)}" if !contains(local.groups, node.role)]), join(", ", local.groups))
  }

  validation {
    condition     = alltrue([for node in var.nodes : length(setsubtract(node.also, local.groups)) == 0])
    error_message = format("nodes: unknown group in %s. Use only %s.", join(", ", [for name, node in var.nodes : "${name}.also = ${jsonencode(node.also)}" if length(setsubtract(node.also, local.groups)) > 0]), join(", ", local.groups))
  }

  validation {
    condition     = alltrue([for node in var.nodes : !strcontains("${node.address}${coalesce(node.fabric_address, "-")}", "[")])
    error_message = format("nodes: IPv6 addresses are written without brackets: %s. Remove the brackets.", join(", ", [for name, node in var.nodes : "${name} = ${jsonencode(compact([node.address, node.fabric_address]))}" if strcontains("${node.address}${coalesce(node.fabric_address, "-")}", "[")]))
  }

  validation {
    condition = alltrue([
      for address in flatten([for node in var.nodes : compact([node.address, node.fabric_address])]) :
      can(cidrhost("${address}/32", 0)) || can(cidrhost("${address}/128", 0)) ||
      (can(regex("^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*$", address)) && !can(regex("^[0-9.]+$", address)))
    ])
    error_message = format("nodes: neither an IP address nor a host name: %s. Give the bare address, without port, prefix length or scheme.", join(", ", flatten([
      for name, node in var.nodes : [
        for field, address in { address = node.address, fabric_address = node.fabric_address } : "${name}.${field} = ${jsonencode(address)}"
        if address != null && !(can(cidrhost("${address}/32", 0)) || can(cidrhost("${address}/128", 0)) ||
        (can(regex("^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*$", address)) && !can(regex("^[0-9.]+$", address))))
      ]
    ])))
  }

  # Two hosts behind one address would take each other's handoffs.
  validation {
    condition = length(distinct([for node in var.nodes : lower(node.address)])) == length(var.nodes)
    error_message = format("nodes: address used by more than one host: %s. Give every host its own address.", join("; ", [
      for address, names in { for name, node in var.nodes : lower(node.address) => name... } : "${address} (${join(", ", names)})" if length(names) > 1
    ]))
  }

  validation {
    condition = alltrue([
      for address, names in { for name, node in var.nodes : lower(coalesce(node.fabric_address, node.address)) => name... } : length(names) == 1
    ])
    error_message = format("nodes: fabric_address used by more than one host: %s. Give every host its own fabric address.", join("; ", [
      for address, names in { for name, node in var.nodes : lower(coalesce(node.fabric_address, node.address)) => name... } : "${address} (${join(", ", names)})" if length(names) > 1
    ]))
  }

  validation {
    condition     = alltrue([for node in var.nodes : node.gpus >= 0 && floor(node.gpus) == node.gpus])
    error_message = format("nodes: gpus must be a whole number, 0 or more: %s. Count the GPUs of the host.", join(", ", [for name, node in var.nodes : "${name}.gpus = ${node.gpus}" if !(node.gpus >= 0 && floor(node.gpus) == node.gpus)]))
  }

  validation {
    condition     = alltrue([for node in var.nodes : length(distinct(node.rdma_devices)) == length(node.rdma_devices)])
    error_message = format("nodes: rdma_devices names a device twice: %s. List each device once.", join(", ", [for name, node in var.nodes : "${name}.rdma_devices = ${jsonencode(node.rdma_devices)}" if length(distinct(node.rdma_devices)) != length(node.rdma_devices)]))
  }
}
