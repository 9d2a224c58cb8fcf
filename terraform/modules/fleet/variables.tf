variable "name" {
  description = "Prefix of every name the cluster makes."
  type        = string

  validation {
    condition     = can(regex("^[a-z]([a-z0-9-]{0,22}[a-z0-9])?$", var.name))
    error_message = "name = ${jsonencode(var.name)} cannot prefix names in every cloud. Use 1 to 24 lower-case letters, digits and hyphens, a letter first."
  }
}

variable "provider_name" {
  description = "Which of the catalogue's providers this is: aws, gcp, oci or onprem."
  type        = string

  validation {
    condition     = contains(["aws", "gcp", "oci", "onprem"], var.provider_name)
    error_message = "provider_name = ${jsonencode(var.provider_name)}: use aws, gcp, oci or onprem."
  }
}

variable "zone" {
  description = "The one zone of the cluster: a handoff does not leave it."
  type        = string
}

variable "members" {
  description = "Pools of like hosts (or single hosts, count 1) by name: role, catalogue shape, count, further groups, key of the reservation they take."
  type = map(object({
    role        = string
    shape       = string
    count       = optional(number, 1)
    also        = optional(set(string), [])
    reservation = optional(string)
  }))
  nullable = false

  validation {
    condition     = alltrue([for name in keys(var.members) : can(regex("^[a-z]([a-z0-9-]{0,22}[a-z0-9])?$", name))])
    error_message = format("pools: %s cannot be part of host names. Use 1 to 24 lower-case letters, digits and hyphens, a letter first.", join(", ", [for name in keys(var.members) : jsonencode(name) if !can(regex("^[a-z]([a-z0-9-]{0,22}[a-z0-9])?$", name))]))
  }

  validation {
    condition     = alltrue([for member in var.members : contains(local.roles, member.role) && length(setsubtract(member.also, local.roles)) == 0])
    error_message = format("pools: unknown role in %s. Use one of %s.", join(", ", [for name, member in var.members : "${name}.role = ${jsonencode(member.role)} (also ${jsonencode(member.also)})" if !contains(local.roles, member.role) || length(setsubtract(member.also, local.roles)) > 0]), join(", ", local.roles))
  }

  validation {
    condition     = length(setsubtract(["prefill", "decode", "router"], [for member in var.members : member.role])) == 0
    error_message = "pools: no pool has role ${join(", ", setsubtract(["prefill", "decode", "router"], [for member in var.members : member.role]))}. A cluster needs prefill, decode and router hosts: add the pool."
  }

  validation {
    condition     = alltrue([for member in var.members : member.count >= 1 && member.count <= 256 && floor(member.count) == member.count])
    error_message = format("pools: %s. Use a whole number from 1 to 256.", join(", ", [for name, member in var.members : "${name}.count = ${member.count}" if !(member.count >= 1 && member.count <= 256 && floor(member.count) == member.count)]))
  }

  validation {
    condition     = alltrue([for member in var.members : contains(keys(module.catalog.shapes), member.shape)])
    error_message = format("pools: unknown shape in %s. Use a shape of terraform/modules/catalog: %s.", join(", ", [for name, member in var.members : "${name}.shape = ${jsonencode(member.shape)}" if !contains(keys(module.catalog.shapes), member.shape)]), join(", ", [for shape, row in module.catalog.shapes : shape if row.provider == var.provider_name]))
  }

  validation {
    condition     = alltrue([for member in var.members : try(module.catalog.shapes[member.shape].provider, var.provider_name) == var.provider_name])
    error_message = format("pools: shape of another provider in %s. This cluster is on %s: use %s.", join(", ", [for name, member in var.members : "${name}.shape = ${jsonencode(member.shape)}" if try(module.catalog.shapes[member.shape].provider, var.provider_name) != var.provider_name]), var.provider_name, join(", ", [for shape, row in module.catalog.shapes : shape if row.provider == var.provider_name]))
  }

  # TileRT's engine is built for eight GPUs of compute capability 10.0 and starts on nothing else.
  validation {
    condition = alltrue([
      for member in var.members : member.role != "decode" || try(module.catalog.shapes[member.shape].gpus == 8 && module.catalog.shapes[member.shape].compute_capability == "10.0", true)
    ])
    error_message = format("pools: %s cannot decode. TileRT needs 8 GPUs of compute capability 10.0 in one host: use %s.",
      join(", ", [for name, member in var.members : "${name}.shape = ${jsonencode(member.shape)}" if member.role == "decode" && !try(module.catalog.shapes[member.shape].gpus == 8 && module.catalog.shapes[member.shape].compute_capability == "10.0", true)]),
    join(", ", [for shape, row in module.catalog.shapes : shape if row.provider == var.provider_name && row.gpus == 8 && try(row.compute_capability == "10.0", false)]))
  }

  validation {
    condition     = alltrue([for member in var.members : member.role != "prefill" || try(module.catalog.shapes[member.shape].gpus > 0, true)])
    error_message = format("pools: %s has no GPU and cannot prefill. Use %s.", join(", ", [for name, member in var.members : "${name}.shape = ${jsonencode(member.shape)}" if member.role == "prefill" && !try(module.catalog.shapes[member.shape].gpus > 0, true)]), join(", ", [for shape, row in module.catalog.shapes : shape if row.provider == var.provider_name && row.gpus > 0]))
  }

  validation {
    condition     = length(distinct([for member in var.members : try(module.catalog.shapes[member.shape].fabric, "") if contains(local.handoff_roles, member.role)])) <= 1
    error_message = format("pools: prefill and decode are on different fabrics (%s). A handoff needs one fabric: choose shapes that share it.", join(", ", [for name, member in var.members : "${name}.shape = ${jsonencode(member.shape)} on ${try(module.catalog.shapes[member.shape].fabric, "?")}" if contains(local.handoff_roles, member.role)]))
  }

  # A GPU host behind the public address would be the cheapest way in and the dearest to lose.
  validation {
    condition     = alltrue([for member in var.members : !(member.role == "ingress" || contains(member.also, "ingress")) || try(module.catalog.shapes[member.shape].gpus == 0, true)])
    error_message = format("pools: %s carries the ingress on a GPU host. Put the ingress on a host without GPUs.", join(", ", [for name, member in var.members : name if(member.role == "ingress" || contains(member.also, "ingress")) && try(module.catalog.shapes[member.shape].gpus > 0, false)]))
  }

  validation {
    condition     = anytrue([for member in var.members : member.role == "ingress" || contains(member.also, "ingress")])
    error_message = "pools: no host carries the ingress. Add `also = [\"ingress\"]` to the router pool, or a pool with role ingress."
  }

  validation {
    condition     = alltrue([for member in var.members : member.reservation == null ? true : contains(keys(var.reservations), member.reservation)])
    error_message = format("pools: %s is not in reservations. Use one of the keys %s, or add it there.", join(", ", [for name, member in var.members : "${name}.reservation = ${jsonencode(member.reservation)}" if member.reservation == null ? false : !contains(keys(var.reservations), member.reservation)]), jsonencode(keys(var.reservations)))
  }

  validation {
    condition     = var.provider_name == "onprem" || var.allow_unreserved || alltrue([for member in var.members : member.reservation != null || try(module.catalog.shapes[member.shape].gpus == 0, true)])
    error_message = format("pools: %s has no reservation. Such shapes are not given on demand: name a reservation, or set allow_unreserved = true to try without.", join(", ", [for name, member in var.members : "${name} (${member.shape})" if member.reservation == null && try(module.catalog.shapes[member.shape].gpus > 0, false)]))
  }

  validation {
    condition = alltrue([
      for member in var.members : member.reservation == null ? true : try(var.reservations[member.reservation].shape == member.shape, true)
    ])
    error_message = format("pools: %s. A reservation serves its own shape only: change one of them.", join(", ", [
      for name, member in var.members : "${name}.shape = ${jsonencode(member.shape)} takes reservation ${member.reservation} for ${jsonencode(var.reservations[member.reservation].shape)}"
      if member.reservation == null ? false : !try(var.reservations[member.reservation].shape == member.shape, true)
    ]))
  }

  validation {
    condition = alltrue([
      for key, reservation in var.reservations : sum(concat([0], [for member in var.members : member.count if member.reservation == null ? false : member.reservation == key])) <= reservation.count
    ])
    error_message = format("pools: more hosts than reserved in %s. Lower the counts or enlarge the reservation.", join(", ", [
      for key, reservation in var.reservations : "reservations.${key} (count ${reservation.count})"
      if sum(concat([0], [for member in var.members : member.count if member.reservation == null ? false : member.reservation == key])) > reservation.count
    ]))
  }
}

variable "reservations" {
  description = "Reserved capacity by a name of one's own: the provider's id, its zone, shape, host count, and end (RFC 3339; null: open)."
  type = map(object({
    id      = string
    zone    = string
    shape   = string
    count   = number
    ends_at = optional(string)
  }))
  default  = {}
  nullable = false

  validation {
    condition     = alltrue([for reservation in var.reservations : reservation.zone == var.zone])
    error_message = format("reservations: %s, but zone = %s. Hosts can take a reservation only in its own zone: change zone, or take another reservation.", join(", ", [for key, reservation in var.reservations : "${key}.zone = ${jsonencode(reservation.zone)}" if reservation.zone != var.zone]), jsonencode(var.zone))
  }

  validation {
    condition     = alltrue([for reservation in var.reservations : reservation.ends_at == null ? true : can(timecmp(reservation.ends_at, "2020-01-01T00:00:00Z"))])
    error_message = format("reservations: %s is not a time. Write it as 2030-01-31T11:30:00Z.", join(", ", [for key, reservation in var.reservations : "${key}.ends_at = ${jsonencode(reservation.ends_at)}" if reservation.ends_at == null ? false : !can(timecmp(reservation.ends_at, "2020-01-01T00:00:00Z"))]))
  }

  validation {
    condition     = alltrue([for reservation in var.reservations : reservation.ends_at == null ? true : try(timecmp(reservation.ends_at, plantimestamp()) > 0, true)])
    error_message = format("reservations: %s has passed. Its hosts are gone or will not start: extend it, or take another reservation.", join(", ", [for key, reservation in var.reservations : "${key}.ends_at = ${jsonencode(reservation.ends_at)}" if reservation.ends_at == null ? false : !try(timecmp(reservation.ends_at, plantimestamp()) > 0, true)]))
  }

  validation {
    condition     = alltrue([for reservation in var.reservations : length(trimspace(reservation.id)) > 0])
    error_message = format("reservations: id of %s is empty. Give the id the provider shows for the reservation.", join(", ", [for key, reservation in var.reservations : key if length(trimspace(reservation.id)) == 0]))
  }
}

variable "allow_unreserved" {
  description = "Lets GPU pools try on-demand capacity."
  type        = bool
  default     = false
}

variable "transport" {
  description = "What moves a handoff: library (mooncake or nixl) and protocol (rdma, efa, tcp for Mooncake; UCX, LIBFABRIC for NIXL)."
  type = object({
    library  = string
    protocol = string
  })

  validation {
    condition     = contains(["mooncake:rdma", "mooncake:efa", "mooncake:tcp", "nixl:UCX", "nixl:LIBFABRIC"], "${var.transport.library}:${var.transport.protocol}")
    error_message = "transport = ${jsonencode(var.transport)} is unknown. Use library mooncake with protocol rdma, efa or tcp, or library nixl with protocol UCX or LIBFABRIC."
  }

  validation {
    condition = alltrue([
      for member in var.members : contains(try(module.catalog.shapes[member.shape].transports, ["${var.transport.library}:${var.transport.protocol}"]), "${var.transport.library}:${var.transport.protocol}")
      if contains(local.handoff_roles, member.role)
    ])
    error_message = format("transport = %s does not work on the fabric of %s. Use %s.", jsonencode(var.transport),
      join(", ", distinct([for member in var.members : "${member.shape} (${module.catalog.shapes[member.shape].fabric})" if contains(local.handoff_roles, member.role) && contains(keys(module.catalog.shapes), member.shape)])),
    join(" or ", distinct(flatten([for member in var.members : try(module.catalog.shapes[member.shape].transports, []) if contains(local.handoff_roles, member.role)]))))
  }
}

variable "networks" {
  description = "Every IPv4 network by the variable that holds it: its CIDR, how many hosts need an address in it, and the network it is a part of."
  type = map(object({
    cidr   = string
    hosts  = optional(number, 0)
    within = optional(string)
  }))
  default  = {}
  nullable = false

  validation {
    condition     = alltrue([for network in var.networks : try(cidrsubnet(network.cidr, 0, 0) == network.cidr && can(cidrnetmask(network.cidr)), false)])
    error_message = format("%s is not an IPv4 network. Write its first address and its length, such as 10.80.0.0/20.", join(", ", [for name, network in var.networks : "${name} = ${jsonencode(network.cidr)}" if !try(cidrsubnet(network.cidr, 0, 0) == network.cidr && can(cidrnetmask(network.cidr)), false)]))
  }

  # Two networks overlap if they are equal when both are cut to the shorter of their prefixes.
  validation {
    condition = alltrue(flatten([
      for a, first in var.networks : [
        for b, second in var.networks : try(
          cidrhost("${split("/", first.cidr)[0]}/${min(split("/", first.cidr)[1], split("/", second.cidr)[1])}", 0) !=
          cidrhost("${split("/", second.cidr)[0]}/${min(split("/", first.cidr)[1], split("/", second.cidr)[1])}", 0),
        true) if index(keys(var.networks), a) < index(keys(var.networks), b) && !try(first.within == b, false) && !try(second.within == a, false)
      ]
    ]))
    error_message = format("networks overlap: %s. Give each its own range.", join("; ", flatten([
      for a, first in var.networks : [
        for b, second in var.networks : "${a} = ${first.cidr} and ${b} = ${second.cidr}" if index(keys(var.networks), a) < index(keys(var.networks), b) && !try(first.within == b, false) && !try(second.within == a, false) && try(
          cidrhost("${split("/", first.cidr)[0]}/${min(split("/", first.cidr)[1], split("/", second.cidr)[1])}", 0) ==
          cidrhost("${split("/", second.cidr)[0]}/${min(split("/", first.cidr)[1], split("/", second.cidr)[1])}", 0),
        false)
      ]
    ])))
  }

  validation {
    condition = alltrue([for network in var.networks : network.within == null ? true : try(
      cidrhost("${split("/", network.cidr)[0]}/${split("/", var.networks[network.within].cidr)[1]}", 0) == cidrhost(var.networks[network.within].cidr, 0) &&
      tonumber(split("/", network.cidr)[1]) >= tonumber(split("/", var.networks[network.within].cidr)[1]),
    false)])
    error_message = format("%s. Move the part, or widen the whole.", join(", ", [
      for name, network in var.networks : "${name} = ${network.cidr} does not lie in ${network.within} = ${try(var.networks[network.within].cidr, "?")}"
      if network.within == null ? false : !try(
        cidrhost("${split("/", network.cidr)[0]}/${split("/", var.networks[network.within].cidr)[1]}", 0) == cidrhost(var.networks[network.within].cidr, 0) &&
        tonumber(split("/", network.cidr)[1]) >= tonumber(split("/", var.networks[network.within].cidr)[1]),
      false)
    ]))
  }

  # Clouds keep up to five addresses of a network to themselves.
  validation {
    condition     = alltrue([for network in var.networks : try(network.hosts <= pow(2, 32 - tonumber(split("/", network.cidr)[1])) - 5, true)])
    error_message = format("%s has too few addresses. Take a larger network.", join(", ", [for name, network in var.networks : "${name} = ${jsonencode(network.cidr)} for ${network.hosts} hosts" if !try(network.hosts <= pow(2, 32 - tonumber(split("/", network.cidr)[1])) - 5, true)]))
  }
}

variable "access" {
  description = "Who gets in: public SSH keys of operators, networks of API clients (HTTPS), networks of operators (SSH, to the ingress host)."
  type = object({
    ssh_keys        = list(string)
    allowed_clients = list(string)
    admin_clients   = list(string)
  })
  default = { ssh_keys = [], allowed_clients = [], admin_clients = [] }

  validation {
    condition     = alltrue([for key in var.access.ssh_keys : can(regex("^(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp[0-9]+|sk-[a-z0-9@.-]+) [A-Za-z0-9+/=]{16,}( .*)?$", key))])
    error_message = "ssh_keys: entry ${join(", ", [for i, key in var.access.ssh_keys : tostring(i) if !can(regex("^(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp[0-9]+|sk-[a-z0-9@.-]+) [A-Za-z0-9+/=]{16,}( .*)?$", key))])} is not a public key in OpenSSH format. Give the content of the .pub file, never the private key."
  }

  validation {
    condition     = alltrue([for cidr in concat(var.access.allowed_clients, var.access.admin_clients) : can(cidrnetmask(cidr))])
    error_message = format("allowed_clients, admin_clients: %s is not an IPv4 network. Write one as 203.0.113.0/24, a single address as 203.0.113.7/32.", join(", ", [for cidr in concat(var.access.allowed_clients, var.access.admin_clients) : jsonencode(cidr) if !can(cidrnetmask(cidr))]))
  }

  validation {
    condition     = !contains(var.access.admin_clients, "0.0.0.0/0")
    error_message = "admin_clients = 0.0.0.0/0 opens SSH to everyone. Name the networks operators come from."
  }
}

variable "prices" {
  description = "US dollars per hour by shape, with the day and the source of the figure."
  type = map(object({
    usd_per_hour = number
    as_of        = string
    source       = string
  }))
  default  = {}
  nullable = false

  validation {
    condition     = alltrue([for price in var.prices : price.usd_per_hour >= 0 && can(formatdate("YYYY", "${price.as_of}T00:00:00Z")) && length(price.source) > 0])
    error_message = format("prices: %s. Give usd_per_hour >= 0, as_of as YYYY-MM-DD and the source of the figure.", join(", ", [for shape, price in var.prices : shape if !(price.usd_per_hour >= 0 && can(formatdate("YYYY", "${price.as_of}T00:00:00Z")) && length(price.source) > 0)]))
  }
}
