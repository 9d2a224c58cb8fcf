variable "name" {
  description = "Name of the cluster."
  type        = string
  default     = "tilert"
}

variable "zone" {
  description = "The room, row or fabric all hosts share."
  type        = string
  default     = "rack"
}

variable "hosts" {
  description = <<-EOT
    Existing hosts by name: role, catalogue shape, `address` (services listen there), `fabric_address` (handoffs arrive
    there; null: the same), `rdma_devices` as the kernel names them, further groups (`also`), and `ansible_host` where it
    is not `address`.
  EOT
  type = map(object({
    role           = string
    shape          = string
    address        = string
    fabric_address = optional(string)
    rdma_devices   = optional(list(string), [])
    also           = optional(set(string), [])
    ansible_host   = optional(string)
  }))
  nullable = false

  validation {
    condition     = length(var.hosts) > 0
    error_message = "hosts is empty. List at least a prefill, a decode and a router host."
  }

  validation {
    condition = alltrue([
      for host in var.hosts : try(length(host.rdma_devices) == 0 || length(host.rdma_devices) == module.catalog.shapes[host.shape].rdma_nics, true)
    ])
    error_message = format("hosts: %s. List every fabric NIC of the host, or none to let the roles find them.", join(", ", [
      for name, host in var.hosts : "${name}.rdma_devices has ${length(host.rdma_devices)} of ${module.catalog.shapes[host.shape].rdma_nics}"
      if !try(length(host.rdma_devices) == 0 || length(host.rdma_devices) == module.catalog.shapes[host.shape].rdma_nics, true)
    ]))
  }
}

variable "transport" {
  description = "What moves a handoff: library (mooncake or nixl) and protocol (rdma, efa, tcp for Mooncake; UCX, LIBFABRIC for NIXL)."
  type = object({
    library  = string
    protocol = string
  })
}

variable "ssh_user" {
  description = "As whom Ansible enters the hosts."
  type        = string
  default     = "ubuntu"
}

variable "prices" {
  description = "US dollars per hour by shape, with the day (YYYY-MM-DD) and the source of the figure; they go before the list prices of modules/catalog."
  type = map(object({
    usd_per_hour = number
    as_of        = string
    source       = string
  }))
  default = {}
}
