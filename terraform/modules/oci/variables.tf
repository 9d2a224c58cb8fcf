variable "name" {
  description = "Prefix of every name the cluster makes."
  type        = string
}

variable "zone" {
  description = "Availability domain of the whole cluster, such as abcD:EU-FRANKFURT-1-AD-2."
  type        = string

  validation {
    condition     = can(regex("^[A-Za-z0-9]+:[A-Z0-9-]+-AD-[1-3]$", var.zone))
    error_message = "zone = ${jsonencode(var.zone)} is not an availability domain. Write it as abcD:EU-FRANKFURT-1-AD-2."
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
  description = "Reserved capacity by a name of one's own: the OCID of the capacity reservation, its zone, shape, host count, and end (RFC 3339; null: open)."
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
    condition     = alltrue([for reservation in var.reservations : can(regex("^ocid1\\.capacityreservation\\.", reservation.id))])
    error_message = format("reservations: %s is not a capacity reservation. OCIDs of one start with ocid1.capacityreservation.", join(", ", [for key, reservation in var.reservations : "${key}.id = ${jsonencode(reservation.id)}" if !can(regex("^ocid1\\.capacityreservation\\.", reservation.id))]))
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
  description = "`vcn_cidr` holds all; `host_cidr` is the private subnet of all hosts but the ingress, `ingress_cidr` the public one. `peers` are networks this one will be routed to."
  type = object({
    vcn_cidr     = optional(string, "10.80.0.0/16")
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
  description = "OCIDs of the images of GPU hosts and of the others; modules/catalog says what each shape expects of its image."
  type = object({
    gpu = string
    cpu = string
  })

  validation {
    condition     = alltrue([for image in values(var.image) : can(regex("^ocid1\\.image\\.", image))])
    error_message = "image = ${jsonencode(var.image)}: OCIDs of images start with ocid1.image."
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

variable "prices" {
  description = "US dollars per hour by shape, with the day (YYYY-MM-DD) and the source of the figure; they go before the list prices of modules/catalog."
  type = map(object({
    usd_per_hour = number
    as_of        = string
    source       = string
  }))
  default = {}
}

variable "compartment_id" {
  description = "OCID of the compartment that holds the cluster."
  type        = string

  validation {
    condition     = can(regex("^ocid1\\.(compartment|tenancy)\\.", var.compartment_id))
    error_message = "compartment_id = ${jsonencode(var.compartment_id)} is not a compartment. OCIDs of one start with ocid1.compartment."
  }
}

variable "fabric" {
  description = "How RDMA hosts are put on one fabric: compute-cluster (each host by itself, replaceable alone) or cluster-network (a managed pool of like hosts for each pool, all made or none)."
  type        = string
  default     = "compute-cluster"

  validation {
    condition     = contains(["compute-cluster", "cluster-network"], var.fabric)
    error_message = "fabric = ${jsonencode(var.fabric)}: use compute-cluster or cluster-network."
  }
}
