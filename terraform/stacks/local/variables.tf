variable "name" {
  description = "Prefix of every host's name, and the name of the podman network."
  type        = string
  default     = "tilert"

  validation {
    condition     = can(regex("^[a-z]([a-z0-9-]{0,29}[a-z0-9])?$", var.name))
    error_message = "name = ${jsonencode(var.name)} cannot prefix host names. Use 1 to 31 lower-case letters, digits and hyphens, a letter first."
  }
}

variable "prefill_count" {
  description = "Number of prefill hosts."
  type        = number
  default     = 1

  validation {
    condition     = contains(range(1, 51), var.prefill_count)
    error_message = "prefill_count = ${var.prefill_count}: use a whole number from 1 to 50."
  }
}

variable "decode_count" {
  description = "Number of decode hosts."
  type        = number
  default     = 2

  validation {
    condition     = contains(range(1, 51), var.decode_count)
    error_message = "decode_count = ${var.decode_count}: use a whole number from 1 to 50."
  }
}

variable "router_count" {
  description = "Number of router hosts. The first one carries the ingress."
  type        = number
  default     = 1

  validation {
    condition     = contains(range(1, 51), var.router_count)
    error_message = "router_count = ${var.router_count}: use a whole number from 1 to 50."
  }
}

variable "subnet" {
  description = "IPv4 network of the cluster, private and used by nothing else on this machine."
  type        = string
  default     = "10.89.88.0/24"

  validation {
    condition     = can(cidrnetmask(var.subnet)) && try(cidrsubnet(var.subnet, 0, 0) == var.subnet, false)
    error_message = "subnet = ${jsonencode(var.subnet)} is not an IPv4 network. Write the network's first address and its length, such as 10.89.88.0/24."
  }

  validation {
    condition     = can(regex("^(10\\.|172\\.(1[6-9]|2[0-9]|3[01])\\.|192\\.168\\.)", var.subnet))
    error_message = "subnet = ${jsonencode(var.subnet)} is not private. Use a part of 10.0.0.0/8, 172.16.0.0/12 or 192.168.0.0/16."
  }

  # Hosts take fixed places in the first 256 addresses.
  validation {
    condition     = try(tonumber(split("/", var.subnet)[1]) >= 16 && tonumber(split("/", var.subnet)[1]) <= 24, false)
    error_message = "subnet = ${jsonencode(var.subnet)} has the wrong size. Use a length from /16 to /24."
  }
}

variable "image" {
  description = "Image of the hosts, as scripts/build-image.sh prints it (bin/demo sets it)."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9._/:@-]*$", var.image))
    error_message = "image = ${jsonencode(var.image)} is not an image name. Use the one that scripts/build-image.sh prints."
  }
}

variable "wheelhouse_dir" {
  description = "Folder of Python wheels, mounted read-only at /srv/wheelhouse. null: .local/wheelhouse of the repository."
  type        = string
  default     = null

  validation {
    condition     = var.wheelhouse_dir == null ? true : can(regex("^/[^:]*$", var.wheelhouse_dir))
    error_message = "wheelhouse_dir = ${var.wheelhouse_dir == null ? "null" : jsonencode(var.wheelhouse_dir)}: give an absolute path without a colon."
  }
}

variable "models_dir" {
  description = "Folder of model weights, mounted read-only at /srv/models. null: .local/models of the repository."
  type        = string
  default     = null

  validation {
    condition     = var.models_dir == null ? true : can(regex("^/[^:]*$", var.models_dir))
    error_message = "models_dir = ${var.models_dir == null ? "null" : jsonencode(var.models_dir)}: give an absolute path without a colon."
  }
}

variable "ingress_host" {
  description = "Address of this machine on which the ingress is published."
  type        = string
  default     = "127.0.0.1"

  validation {
    condition     = can(cidrhost("${var.ingress_host}/32", 0))
    error_message = "ingress_host = ${jsonencode(var.ingress_host)} is not an IPv4 address. Use 127.0.0.1, or an address of this machine."
  }
}

variable "ingress_port" {
  description = "Port of this machine on which the ingress is published."
  type        = number
  default     = 8088

  validation {
    condition     = var.ingress_port >= 1 && var.ingress_port <= 65535 && floor(var.ingress_port) == var.ingress_port
    error_message = "ingress_port = ${var.ingress_port}: use a free port from 1 to 65535."
  }
}

variable "memory" {
  description = "Memory limit of a host by role, such as `{prefill = \"6g\"}`. A role left out has no limit."
  type = object({
    prefill = optional(string, "")
    decode  = optional(string, "")
    router  = optional(string, "")
  })
  default  = {}
  nullable = false

  validation {
    condition     = alltrue([for limit in values(var.memory) : can(regex("^([1-9][0-9]*[mg])?$", limit))])
    error_message = "memory = ${jsonencode(var.memory)}: write each limit as a whole number followed by m or g, such as 6g."
  }
}

variable "shm_size" {
  description = "Shared memory of each host. vLLM's CPU engine does not start with podman's default of 64 MB."
  type        = string
  default     = "1g"

  validation {
    condition     = can(regex("^[1-9][0-9]*[mg]$", var.shm_size))
    error_message = "shm_size = ${jsonencode(var.shm_size)}: write a whole number followed by m or g, such as 1g."
  }
}
