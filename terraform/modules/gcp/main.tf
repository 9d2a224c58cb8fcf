module "fleet" {
  source = "../fleet"

  name             = var.name
  provider_name    = "gcp"
  zone             = var.zone
  members          = var.pools
  reservations     = var.reservations
  allow_unreserved = var.allow_unreserved
  transport        = var.transport
  prices           = var.prices
  access = {
    ssh_keys        = var.ssh_keys
    allowed_clients = var.allowed_clients
    admin_clients   = var.admin_clients
  }
  networks = merge(
    {
      "network.host_cidr"   = { cidr = var.network.host_cidr, hosts = sum([for pool in values(var.pools) : pool.count]) }
      "network.second_cidr" = { cidr = var.network.second_cidr, hosts = sum([for pool in values(var.pools) : pool.count]) }
      # A quarter of a power of two is left per rail when the range is cut into one subnet for each.
      "network.fabric_cidr" = { cidr = var.network.fabric_cidr, hosts = sum([for pool in values(var.pools) : pool.count]) * pow(2, local.rail_bits) }
    },
    { for name, cidr in var.network.peers : "network.peers.${name}" => { cidr = cidr } },
  )
}

locals {
  hosts         = module.fleet.hosts
  shapes        = module.fleet.shapes
  ingress_hosts = [for name, host in local.hosts : name if host.role == "ingress" || contains(host.also, "ingress")]

  region = join("-", slice(split("-", var.zone), 0, 2))
  rails  = max([for shape in values(local.shapes) : shape.rails]...)

  # As many ordinary NICs as any pool has: each needs a network of its own.
  ordinary_networks = { for i, cidr in [var.network.host_cidr, var.network.second_cidr] : tostring(i) => cidr if i < max([for shape in values(local.shapes) : shape.ordinary_nics]...) }

  addresses        = { for name, instance in google_compute_instance.host : name => instance.network_interface[0].network_ip }
  public_addresses = { for name in local.ingress_hosts : name => google_compute_address.ingress[name].address }
  fabric_addresses = {
    for name, host in local.hosts : name => local.shapes[host.shape].rdma_nics == 0 ? null : google_compute_instance.host[name].network_interface[local.shapes[host.shape].ordinary_nics].network_ip
  }

  # Only the ingress has a public address; the other hosts are entered through it.
  jump = try(local.public_addresses[sort(local.ingress_hosts)[0]], null)
  nodes = {
    for name, host in local.hosts : name => {
      role           = host.role
      also           = host.also
      address        = local.addresses[name]
      fabric_address = local.fabric_addresses[name]
      # What the kernel calls them is known on the host only: the roles read it there.
      rdma_devices = []
      gpus         = host.gpus
      shape        = host.shape
      vars = merge(
        { ansible_user = var.ssh_user, tilert_transport = var.transport.library, tilert_protocol = var.transport.protocol },
        contains(local.ingress_hosts, name) ? { ansible_host = local.public_addresses[name] } : { ansible_ssh_common_args = "-o ProxyJump=${var.ssh_user}@${local.jump}" },
      )
    }
  }
}

locals {
  # Eight rails everywhere today; the next power of two keeps the cut exact.
  rail_bits = ceil(log(max(1, local.rails), 2))
}

# The largest MTU the fabric has: RoCE with 4096-byte payloads needs more than Google's default of 1460.
resource "google_compute_network" "ordinary" {
  for_each = local.ordinary_networks

  project                 = var.project
  name                    = "${var.name}-${each.key}"
  auto_create_subnetworks = false
  mtu                     = 8896
}

resource "google_compute_subnetwork" "ordinary" {
  for_each = local.ordinary_networks

  project                  = var.project
  name                     = "${var.name}-${each.key}"
  region                   = local.region
  network                  = google_compute_network.ordinary[each.key].id
  ip_cidr_range            = each.value
  private_ip_google_access = true

  log_config {
    aggregation_interval = "INTERVAL_10_MIN"
    flow_sampling        = 0.1
    metadata             = "EXCLUDE_ALL_METADATA"
  }
}

# RDMA NICs attach to a network made from the zone's RDMA profile and to nothing else.
resource "google_compute_network" "fabric" {
  #checkov:skip=CKV2_GCP_18:an RDMA profile network takes no VPC firewall rules
  project                 = var.project
  name                    = "${var.name}-fabric"
  auto_create_subnetworks = false
  mtu                     = 8896
  network_profile         = "projects/${var.project}/global/networkProfiles/${coalesce(var.network_profile, "${var.zone}-vpc-roce")}"
}

resource "google_compute_subnetwork" "rail" {
  #checkov:skip=CKV_GCP_74:an RDMA profile network has no private Google access
  #checkov:skip=CKV_GCP_26:an RDMA profile network has no flow logs
  count = local.rails

  project       = var.project
  name          = "${var.name}-rail-${count.index}"
  region        = local.region
  network       = google_compute_network.fabric.id
  ip_cidr_range = cidrsubnet(var.network.fabric_cidr, local.rail_bits, count.index)
}

resource "google_compute_firewall" "cluster" {
  for_each = local.ordinary_networks

  project       = var.project
  name          = "${var.name}-cluster-${each.key}"
  description   = "Everything between hosts of the cluster"
  network       = google_compute_network.ordinary[each.key].id
  direction     = "INGRESS"
  source_ranges = [each.value]

  allow {
    protocol = "all"
  }
}

resource "google_compute_firewall" "clients" {
  project       = var.project
  name          = "${var.name}-clients"
  description   = "HTTPS from clients, to the ingress hosts"
  network       = google_compute_network.ordinary["0"].id
  direction     = "INGRESS"
  source_ranges = var.allowed_clients
  target_tags   = ["${var.name}-ingress"]

  allow {
    protocol = "tcp"
    ports    = ["443"]
  }
}

resource "google_compute_firewall" "admins" {
  count = length(var.admin_clients) > 0 ? 1 : 0

  project       = var.project
  name          = "${var.name}-admins"
  description   = "SSH from operators, to the ingress hosts"
  network       = google_compute_network.ordinary["0"].id
  direction     = "INGRESS"
  source_ranges = var.admin_clients
  target_tags   = ["${var.name}-ingress"]

  allow {
    protocol = "tcp"
    ports    = ["22"]
  }
}

resource "google_compute_router" "hosts" {
  count = var.nat ? 1 : 0

  project = var.project
  name    = "${var.name}-hosts"
  region  = local.region
  network = google_compute_network.ordinary["0"].id
}

# The way out of the hosts' first NIC, and of nothing else.
resource "google_compute_router_nat" "hosts" {
  count = var.nat ? 1 : 0

  project                            = var.project
  name                               = "${var.name}-hosts"
  region                             = local.region
  router                             = google_compute_router.hosts[0].name
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "LIST_OF_SUBNETWORKS"

  subnetwork {
    name                    = google_compute_subnetwork.ordinary["0"].id
    source_ip_ranges_to_nat = ["ALL_IP_RANGES"]
  }

  log_config {
    enable = true
    filter = "ERRORS_ONLY"
  }
}

resource "google_compute_address" "ingress" {
  for_each = toset(local.ingress_hosts)

  project      = var.project
  name         = each.value
  region       = local.region
  address_type = "EXTERNAL"
}

# One for each shape: hosts of one machine type are placed close to each other.
resource "google_compute_resource_policy" "fabric" {
  for_each = toset([for shape, row in local.shapes : shape if row.rdma])

  project = var.project
  name    = "${var.name}-${each.key}"
  region  = local.region

  group_placement_policy {
    collocation = "COLLOCATED"
  }
}

resource "google_compute_instance" "host" {
  #checkov:skip=CKV_GCP_38:encrypted with Google's keys; a key of one's own would be a secret in state
  #checkov:skip=CKV_GCP_40:only the ingress hosts have a public address
  for_each = local.hosts

  project                   = var.project
  name                      = each.key
  zone                      = var.zone
  machine_type              = each.value.shape
  allow_stopping_for_update = true
  deletion_protection       = var.protect && each.value.gpus > 0
  labels                    = { cluster = var.name, role = each.value.role }
  tags                      = contains(local.ingress_hosts, each.key) ? ["${var.name}-ingress"] : []
  resource_policies         = local.shapes[each.value.shape].rdma ? [google_compute_resource_policy.fabric[each.value.shape].id] : []

  metadata = {
    ssh-keys                 = join("\n", [for key in var.ssh_keys : "${var.ssh_user}:${key}"])
    block-project-ssh-keys   = "true"
    serial-port-enable       = "false"
    disable-legacy-endpoints = "true"
  }

  boot_disk {
    initialize_params {
      image = each.value.gpus > 0 ? var.image.gpu : var.image.cpu
      size  = each.value.gpus > 0 ? var.disks.gpu_boot_gb : var.disks.cpu_boot_gb
      type  = "hyperdisk-balanced"
    }
  }

  dynamic "network_interface" {
    for_each = range(local.shapes[each.value.shape].ordinary_nics)
    content {
      subnetwork = google_compute_subnetwork.ordinary[tostring(network_interface.value)].id
      nic_type   = "GVNIC"

      dynamic "access_config" {
        for_each = network_interface.value == 0 && contains(local.ingress_hosts, each.key) ? [google_compute_address.ingress[each.key].address] : []
        content {
          nat_ip = access_config.value
        }
      }
    }
  }

  # Rail by rail in order: NIC n of one host reaches NIC n of another.
  dynamic "network_interface" {
    for_each = range(local.shapes[each.value.shape].rdma_nics)
    content {
      subnetwork = google_compute_subnetwork.rail[network_interface.value].id
      nic_type   = "MRDMA"
    }
  }

  scheduling {
    # GPU hosts cannot be moved while they run.
    on_host_maintenance         = each.value.gpus > 0 ? "TERMINATE" : "MIGRATE"
    automatic_restart           = true
    provisioning_model          = local.reserved[each.key] == null ? "STANDARD" : "RESERVATION_BOUND"
    instance_termination_action = local.reserved[each.key] == null ? null : "DELETE"
  }

  dynamic "reservation_affinity" {
    for_each = local.reserved[each.key] == null ? [] : [local.reserved[each.key]]
    content {
      type = "SPECIFIC_RESERVATION"
      specific_reservation {
        key    = "compute.googleapis.com/reservation-name"
        values = [reservation_affinity.value]
      }
    }
  }

  shielded_instance_config {
    # NVIDIA's modules are not signed with a key that secure boot knows.
    enable_secure_boot          = each.value.gpus == 0
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }
}

locals {
  reserved = { for name, host in local.hosts : name => try(var.reservations[var.pools[host.pool].reservation].id, null) }
}

module "inventory" {
  source = "../inventory"
  nodes  = local.nodes
}

data "google_compute_machine_types" "zone" {
  for_each = local.shapes

  project = var.project
  zone    = var.zone
  filter  = "name = \"${each.key}\""
}

# Only a live project knows whether the shape is offered to it in this zone.
check "zone_offers_the_shapes" {
  assert {
    condition     = alltrue([for types in values(data.google_compute_machine_types.zone) : length(types.machine_types) == 1])
    error_message = format("zone = %s: it does not offer %s to project %s. Choose another zone, or ask for access.", jsonencode(var.zone), join(", ", [for shape, types in data.google_compute_machine_types.zone : shape if length(types.machine_types) != 1]), var.project)
  }
}
