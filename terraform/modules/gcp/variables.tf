variable "name" {
  description = "Prefix of every name the cluster makes."
  type        = string
}

variable "zone" {
  description = "Zone of the whole cluster, such as us-central1-b."
  type        = string

  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+-[a-z]$", var.zone))
    error_message = "zone = ${jsonencode(var.zone)} is not a zone. Write it as us-central1-b."
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
  description = "Reserved capacity by a name of one's own: its name (projects/PROJECT/reservations/NAME for a shared one), its zone, shape, host count, and end (RFC 3339; null: open)."
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
    condition     = alltrue([for reservation in var.reservations : can(regex("^(projects/[a-z0-9:.-]+/reservations/)?[a-z]([a-z0-9-]*[a-z0-9])?(/reservationBlocks/[a-z0-9-]+)?$", reservation.id))])
    error_message = format("reservations: %s is not a reservation's name. Write NAME, or projects/PROJECT/reservations/NAME for a shared one.", join(", ", [for key, reservation in var.reservations : "${key}.id = ${jsonencode(reservation.id)}" if !can(regex("^(projects/[a-z0-9:.-]+/reservations/)?[a-z]([a-z0-9-]*[a-z0-9])?(/reservationBlocks/[a-z0-9-]+)?$", reservation.id))]))
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
  description = "`host_cidr` is the subnet of the hosts' first NIC, `second_cidr` of their second, `fabric_cidr` is cut into one subnet per rail. `peers` are networks this one will be routed to."
  type = object({
    host_cidr   = optional(string, "10.80.0.0/20")
    second_cidr = optional(string, "10.80.16.0/20")
    fabric_cidr = optional(string, "10.96.0.0/16")
    peers       = optional(map(string), {})
  })
  default  = {}
  nullable = false
}

variable "nat" {
  description = "Lets private hosts reach the internet through Cloud NAT (for packages). false: no way out; they install from a bundle (bin/bundle)."
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
  description = "Images of GPU hosts and of the others, as PROJECT/FAMILY or a self link; modules/catalog says what each shape expects of its image."
  type = object({
    gpu = string
    cpu = string
  })

  validation {
    condition     = alltrue([for image in values(var.image) : can(regex("^(projects/)?[a-z0-9:.-]+/[a-z0-9/._-]+$", image))])
    error_message = "image = ${jsonencode(var.image)}: write PROJECT/FAMILY or projects/PROJECT/global/images/NAME."
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

variable "project" {
  description = "Project that holds the cluster."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project))
    error_message = "project = ${jsonencode(var.project)} is not a project id. Use the id (6 to 30 lower-case letters, digits, hyphens), not the display name or number."
  }
}

variable "network_profile" {
  description = "RDMA network profile of the zone; null: `<zone>-vpc-roce`."
  type        = string
  default     = null

  # RDMA NICs refuse an ordinary VPC, and a profile works in its own zone only.
  validation {
    condition     = var.network_profile == null ? true : var.network_profile == "${var.zone}-vpc-roce"
    error_message = "network_profile = ${try(jsonencode(var.network_profile), "null")} does not give RDMA NICs a network in zone = ${jsonencode(var.zone)}. Use ${var.zone}-vpc-roce, or leave it out."
  }
}
