variable "name" {
  description = "Prefix of every name the cluster makes."
  type        = string
}

variable "zone" {
  description = "Availability zone of the whole cluster, such as us-west-2b."
  type        = string

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9][a-z]$", var.zone))
    error_message = "zone = ${jsonencode(var.zone)} is not an availability zone. Write it as us-west-2b."
  }
}

variable "pools" {
  description = "Pools of like hosts by name: role, catalogue shape, count, further groups (`also`), key of the reservation they take."
  type = map(object({
    role        = string
    shape       = string
    count       = optional(number, 1)
    also        = optional(set(string), [])
    reservation = optional(string)
  }))
  nullable = false
}

variable "reservations" {
  description = "Reserved capacity by a name of one's own: the capacity reservation's id, its zone, shape, host count, end (RFC 3339; null: open), `kind` (on-demand or capacity-block), and the cluster placement group it was made in (null: none)."
  type = map(object({
    id              = string
    zone            = string
    shape           = string
    count           = number
    ends_at         = optional(string)
    kind            = optional(string, "on-demand")
    placement_group = optional(string)
  }))
  default  = {}
  nullable = false

  validation {
    condition     = alltrue([for reservation in var.reservations : can(regex("^cr-[0-9a-f]{8,}$", reservation.id))])
    error_message = format("reservations: %s is not a capacity reservation. Ids look like cr-0123456789abcdef0; a capacity block has one too, once it is bought.", join(", ", [for key, reservation in var.reservations : "${key}.id = ${jsonencode(reservation.id)}" if !can(regex("^cr-[0-9a-f]{8,}$", reservation.id))]))
  }

  validation {
    condition     = alltrue([for reservation in var.reservations : contains(["on-demand", "capacity-block"], reservation.kind)])
    error_message = format("reservations: %s. Use \"on-demand\" or \"capacity-block\".", join(", ", [for key, reservation in var.reservations : "${key}.kind = ${jsonencode(reservation.kind)}" if !contains(["on-demand", "capacity-block"], reservation.kind)]))
  }

  # A block ends by itself, and its hosts with it.
  validation {
    condition     = alltrue([for reservation in var.reservations : reservation.kind != "capacity-block" || reservation.ends_at != null])
    error_message = format("reservations: %s is a capacity block without ends_at. Give the end that the block was bought with.", join(", ", [for key, reservation in var.reservations : key if reservation.kind == "capacity-block" && reservation.ends_at == null]))
  }

  validation {
    condition     = alltrue([for reservation in var.reservations : reservation.kind != "capacity-block" || reservation.placement_group == null])
    error_message = format("reservations: %s is a capacity block with a placement_group. AWS places the hosts of a block itself and refuses one: leave it out.", join(", ", [for key, reservation in var.reservations : key if reservation.kind == "capacity-block" && reservation.placement_group != null]))
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
}

variable "network" {
  description = "`vpc_cidr` holds all; `host_cidr` is the private subnet of all hosts but the ingress, `ingress_cidr` the public one. `peers` are networks this one will be routed to."
  type = object({
    vpc_cidr     = optional(string, "10.80.0.0/16")
    host_cidr    = optional(string, "10.80.0.0/20")
    ingress_cidr = optional(string, "10.80.16.0/24")
    peers        = optional(map(string), {})
  })
  default  = {}
  nullable = false
}

variable "nat" {
  description = "Lets private hosts reach the internet through a NAT gateway (ports 80 and 443, for packages). false: no way out; they install from a bundle (bin/bundle)."
  type        = bool
  default     = false
}

variable "ssh_keys" {
  description = "Public SSH keys of the operators."
  type        = list(string)

  validation {
    condition     = length(var.ssh_keys) > 0
    error_message = "ssh_keys is empty: nobody could enter the hosts. Give at least one public key."
  }
}

variable "allowed_clients" {
  description = "Networks whose API clients reach the ingress (HTTPS)."
  type        = list(string)

  validation {
    condition     = length(var.allowed_clients) > 0
    error_message = "allowed_clients is empty: nobody could reach the ingress. Name at least one network."
  }
}

variable "admin_clients" {
  description = "Networks from which operators reach the ingress host (SSH); the other hosts are entered through it."
  type        = list(string)
  default     = []
}

variable "image" {
  description = "AMI ids of GPU hosts and of the others; modules/catalog says what each shape expects of its image."
  type = object({
    gpu = string
    cpu = string
  })

  validation {
    condition     = alltrue([for image in values(var.image) : can(regex("^ami-[0-9a-f]{8,}$", image))])
    error_message = "image = ${jsonencode(var.image)}: AMI ids look like ami-0123456789abcdef0. Give the ids of your region."
  }
}

variable "ssh_user" {
  description = "The image's login user, as which Ansible enters."
  type        = string
  default     = "ubuntu"
}

variable "disks" {
  description = "Boot disks. GPU hosts keep converted weights on their local NVMe; the boot disk holds system and environments."
  type = object({
    gpu_boot_gb = optional(number, 500)
    cpu_boot_gb = optional(number, 100)
  })
  default  = {}
  nullable = false

  validation {
    condition     = alltrue([for size in values(var.disks) : size >= 50 && size <= 16000 && floor(size) == size])
    error_message = "disks = ${jsonencode(var.disks)}: use whole GB from 50 to 16000."
  }
}

variable "protect" {
  description = "Keeps GPU hosts from being deleted by mistake, by this configuration too: to destroy the cluster, apply once with false before."
  type        = bool
  default     = true
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

variable "weights" {
  description = "Shared storage for weights (FSx for Lustre, SSD): size in GiB, throughput in MiB/s per TiB, and whether hosts read it over EFA; null: none."
  type = object({
    storage_gib       = number
    mib_per_s_per_tib = optional(number, 1000)
    efa               = optional(bool, true)
  })
  default = null

  validation {
    condition     = var.weights == null ? true : contains([125, 250, 500, 1000], var.weights.mib_per_s_per_tib)
    error_message = "weights.mib_per_s_per_tib = ${try(var.weights.mib_per_s_per_tib, 0)}: use 125, 250, 500 or 1000."
  }

  validation {
    condition     = var.weights == null ? true : var.weights.storage_gib >= 1200 && (var.weights.storage_gib == 1200 || var.weights.storage_gib % 2400 == 0)
    error_message = "weights.storage_gib = ${try(var.weights.storage_gib, 0)}: use 1200 or a multiple of 2400 GiB. GLM-5's converted weights need about 700 GiB."
  }

  # Servers with EFA come in larger units, the more of them the slower each TiB is to be.
  validation {
    condition     = try(!var.weights.efa || var.weights.storage_gib % (4800 * 1000 / var.weights.mib_per_s_per_tib) == 0, true)
    error_message = "weights.storage_gib = ${try(var.weights.storage_gib, 0)}: over EFA at ${try(var.weights.mib_per_s_per_tib, 0)} MiB/s per TiB sizes are multiples of ${try(4800 * 1000 / var.weights.mib_per_s_per_tib, 4800)} GiB. Take one, or set efa = false."
  }
}
