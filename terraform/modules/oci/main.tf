module "fleet" {
  source = "../fleet"

  name             = var.name
  provider_name    = "oci"
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
      "network.vcn_cidr"     = { cidr = var.network.vcn_cidr }
      "network.host_cidr"    = { cidr = var.network.host_cidr, within = "network.vcn_cidr", hosts = sum([for pool in values(var.pools) : pool.count]) }
      "network.ingress_cidr" = { cidr = var.network.ingress_cidr, within = "network.vcn_cidr", hosts = sum(concat([0], [for pool in values(var.pools) : pool.count if pool.role == "ingress" || contains(pool.also, "ingress")])) }
    },
    { for name, cidr in var.network.peers : "network.peers.${name}" => { cidr = cidr } },
  )
}

locals {
  hosts         = module.fleet.hosts
  shapes        = module.fleet.shapes
  ingress_hosts = [for name, host in local.hosts : name if host.role == "ingress" || contains(host.also, "ingress")]

  # The hosts of a cluster network are made by the network; each takes its name by the order of their ids.
  networked = { for i, name in sort([for name, host in local.hosts : name if var.fabric == "cluster-network" && local.shapes[host.shape].rdma]) : name => i }

  addresses = merge(
    { for name, instance in oci_core_instance.host : name => instance.private_ip },
    { for name, instance in data.oci_core_instance.networked : name => instance.private_ip },
  )
  public_addresses = { for name in local.ingress_hosts : name => oci_core_instance.host[name].public_ip }
  # The RDMA agent gives the fabric NICs addresses of their own; peers are met at the first NIC, data goes by device.
  fabric_addresses = { for name in keys(local.hosts) : name => null }

  # Oracle's agent brings up the fabric: authentication on the switch first, then addresses.
  rdma_plugins = ["Compute HPC RDMA Authentication", "Compute HPC RDMA Auto-Configuration", "Compute RDMA GPU Monitoring"]
  tags         = { cluster = var.name }

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

resource "oci_core_vcn" "cluster" {
  compartment_id = var.compartment_id
  cidr_blocks    = [var.network.vcn_cidr]
  display_name   = var.name
  freeform_tags  = local.tags
}

resource "oci_core_internet_gateway" "ingress" {
  compartment_id = var.compartment_id
  vcn_id         = oci_core_vcn.cluster.id
  display_name   = "${var.name}-ingress"
  freeform_tags  = local.tags
}

resource "oci_core_route_table" "ingress" {
  compartment_id = var.compartment_id
  vcn_id         = oci_core_vcn.cluster.id
  display_name   = "${var.name}-ingress"
  freeform_tags  = local.tags

  route_rules {
    destination       = "0.0.0.0/0"
    destination_type  = "CIDR_BLOCK"
    network_entity_id = oci_core_internet_gateway.ingress.id
  }
}

# Without `nat` an empty table: hosts install from a bundle (bin/bundle).
resource "oci_core_route_table" "hosts" {
  compartment_id = var.compartment_id
  vcn_id         = oci_core_vcn.cluster.id
  display_name   = "${var.name}-hosts"
  freeform_tags  = local.tags

  dynamic "route_rules" {
    for_each = oci_core_nat_gateway.hosts[*].id
    content {
      destination       = "0.0.0.0/0"
      destination_type  = "CIDR_BLOCK"
      network_entity_id = route_rules.value
    }
  }
}

resource "oci_core_nat_gateway" "hosts" {
  count = var.nat ? 1 : 0

  compartment_id = var.compartment_id
  vcn_id         = oci_core_vcn.cluster.id
  display_name   = "${var.name}-hosts"
  freeform_tags  = local.tags
}

# No rules: a subnet without a list of its own gets the VCN's, which lets SSH in from everywhere. The security groups decide.
resource "oci_core_security_list" "none" {
  #checkov:skip=CKV_OCI_16:the network security groups say who comes in, not this list
  #checkov:skip=CKV_OCI_19:the list has no rule at all, so none for port 22
  compartment_id = var.compartment_id
  vcn_id         = oci_core_vcn.cluster.id
  display_name   = "${var.name}-none"
  freeform_tags  = local.tags
}

resource "oci_core_subnet" "hosts" {
  compartment_id             = var.compartment_id
  vcn_id                     = oci_core_vcn.cluster.id
  cidr_block                 = var.network.host_cidr
  display_name               = "${var.name}-hosts"
  route_table_id             = oci_core_route_table.hosts.id
  security_list_ids          = [oci_core_security_list.none.id]
  prohibit_public_ip_on_vnic = true
  prohibit_internet_ingress  = true
  freeform_tags              = local.tags
}

resource "oci_core_subnet" "ingress" {
  compartment_id             = var.compartment_id
  vcn_id                     = oci_core_vcn.cluster.id
  cidr_block                 = var.network.ingress_cidr
  display_name               = "${var.name}-ingress"
  route_table_id             = oci_core_route_table.ingress.id
  security_list_ids          = [oci_core_security_list.none.id]
  prohibit_public_ip_on_vnic = false
  freeform_tags              = local.tags
}

resource "oci_core_network_security_group" "cluster" {
  compartment_id = var.compartment_id
  vcn_id         = oci_core_vcn.cluster.id
  display_name   = "${var.name}-cluster"
  freeform_tags  = local.tags
}

resource "oci_core_network_security_group_security_rule" "cluster" {
  #checkov:skip=CKV_OCI_21:stateful: answers need no rule of their own
  #checkov:skip=CKV2_OCI_2:the rule admits the group itself and nobody else
  for_each = toset(["INGRESS", "EGRESS"])

  network_security_group_id = oci_core_network_security_group.cluster.id
  description               = "All traffic between hosts of the cluster"
  direction                 = each.value
  protocol                  = "all"
  source                    = each.value == "INGRESS" ? oci_core_network_security_group.cluster.id : null
  source_type               = each.value == "INGRESS" ? "NETWORK_SECURITY_GROUP" : null
  destination               = each.value == "EGRESS" ? oci_core_network_security_group.cluster.id : null
  destination_type          = each.value == "EGRESS" ? "NETWORK_SECURITY_GROUP" : null
}

resource "oci_core_network_security_group_security_rule" "packages" {
  #checkov:skip=CKV_OCI_21:stateful: answers need no rule of their own
  for_each = var.nat ? toset(["80", "443"]) : toset([])

  network_security_group_id = oci_core_network_security_group.cluster.id
  description               = "Packages, through the NAT gateway"
  direction                 = "EGRESS"
  protocol                  = "6"
  destination               = "0.0.0.0/0"
  destination_type          = "CIDR_BLOCK"

  tcp_options {
    destination_port_range {
      min = tonumber(each.value)
      max = tonumber(each.value)
    }
  }
}

resource "oci_core_network_security_group" "ingress" {
  compartment_id = var.compartment_id
  vcn_id         = oci_core_vcn.cluster.id
  display_name   = "${var.name}-ingress"
  freeform_tags  = local.tags
}

resource "oci_core_network_security_group_security_rule" "ingress" {
  #checkov:skip=CKV_OCI_21:stateful: answers need no rule of their own
  #checkov:skip=CKV2_OCI_2:ports 443 and 22 only
  for_each = merge(
    { for cidr in var.allowed_clients : "https ${cidr}" => { cidr = cidr, port = 443, what = "HTTPS from a client network" } },
    { for cidr in var.admin_clients : "ssh ${cidr}" => { cidr = cidr, port = 22, what = "SSH from an operators' network" } },
  )

  network_security_group_id = oci_core_network_security_group.ingress.id
  description               = each.value.what
  direction                 = "INGRESS"
  protocol                  = "6"
  source                    = each.value.cidr
  source_type               = "CIDR_BLOCK"

  tcp_options {
    destination_port_range {
      min = each.value.port
      max = each.value.port
    }
  }
}

# RDMA hosts made one by one, each replaceable by itself, on one fabric.
resource "oci_core_compute_cluster" "fabric" {
  count = var.fabric == "compute-cluster" ? 1 : 0

  compartment_id      = var.compartment_id
  availability_domain = var.zone
  display_name        = "${var.name}-fabric"
  freeform_tags       = local.tags
}

# The other way: one managed pool of like hosts, made all or not at all.
resource "oci_core_instance_configuration" "fabric" {
  count = var.fabric == "cluster-network" ? 1 : 0

  compartment_id = var.compartment_id
  display_name   = "${var.name}-fabric"
  freeform_tags  = local.tags

  instance_details {
    instance_type = "compute"

    launch_details {
      compartment_id          = var.compartment_id
      availability_domain     = var.zone
      shape                   = one(distinct([for name in keys(local.networked) : local.hosts[name].shape]))
      capacity_reservation_id = try(var.reservations[one(local.networked_reservations)].id, null)
      freeform_tags           = local.tags

      # Public keys only: nothing in here is a secret.
      metadata = { ssh_authorized_keys = join("\n", var.ssh_keys) }

      source_details {
        source_type             = "image"
        image_id                = var.image.gpu
        boot_volume_size_in_gbs = tostring(var.disks.gpu_boot_gb)
      }

      create_vnic_details {
        subnet_id        = oci_core_subnet.hosts.id
        assign_public_ip = false
        nsg_ids          = [oci_core_network_security_group.cluster.id]
      }

      instance_options {
        are_legacy_imds_endpoints_disabled = true
      }

      agent_config {
        are_all_plugins_disabled = false
        is_management_disabled   = false
        is_monitoring_disabled   = false

        dynamic "plugins_config" {
          for_each = local.rdma_plugins
          content {
            name          = plugins_config.value
            desired_state = "ENABLED"
          }
        }
      }
    }
  }

  lifecycle {
    precondition {
      condition     = length(distinct([for name in keys(local.networked) : local.hosts[name].shape])) == 1
      error_message = "fabric = \"cluster-network\": it holds hosts of one shape, and a fabric does not reach beyond it, but pools have ${join(", ", [for name, pool in var.pools : "${name}.shape = ${jsonencode(pool.shape)}" if local.shapes[pool.shape].rdma])}. Give them one shape, or use fabric = \"compute-cluster\"."
    }
    precondition {
      condition     = length(local.networked_reservations) == 1
      error_message = "fabric = \"cluster-network\": its hosts take one reservation, but pools have ${join(", ", [for name, pool in var.pools : "${name}.reservation = ${jsonencode(pool.reservation)}" if local.shapes[pool.shape].rdma])}. Give them one, or use fabric = \"compute-cluster\"."
    }
  }
}

locals {
  networked_reservations = distinct([for name in keys(local.networked) : coalesce(var.pools[local.hosts[name].pool].reservation, "none")])
}

resource "oci_core_cluster_network" "fabric" {
  count = var.fabric == "cluster-network" ? 1 : 0

  compartment_id = var.compartment_id
  display_name   = "${var.name}-fabric"
  freeform_tags  = local.tags

  instance_pools {
    instance_configuration_id = oci_core_instance_configuration.fabric[0].id
    size                      = length(local.networked)
    display_name              = "${var.name}-fabric"
  }

  placement_configuration {
    availability_domain = var.zone
    primary_subnet_id   = oci_core_subnet.hosts.id
  }
}

data "oci_core_cluster_network_instances" "fabric" {
  count = var.fabric == "cluster-network" ? 1 : 0

  compartment_id     = var.compartment_id
  cluster_network_id = oci_core_cluster_network.fabric[0].id
}

data "oci_core_instance" "networked" {
  for_each = local.networked

  instance_id = sort(data.oci_core_cluster_network_instances.fabric[0].instances[*].id)[each.value]
}

resource "oci_core_instance" "host" {
  #checkov:skip=CKV_OCI_4:on for virtual machines; bare metal has no hypervisor that could
  for_each = { for name, host in local.hosts : name => host if !contains(keys(local.networked), name) }

  compartment_id          = var.compartment_id
  availability_domain     = var.zone
  display_name            = each.key
  shape                   = each.value.shape
  compute_cluster_id      = local.shapes[each.value.shape].rdma ? oci_core_compute_cluster.fabric[0].id : null
  capacity_reservation_id = try(var.reservations[var.pools[each.value.pool].reservation].id, null)
  freeform_tags           = merge(local.tags, { role = each.value.role })

  # Public keys only: nothing in here is a secret.
  metadata = { ssh_authorized_keys = join("\n", var.ssh_keys) }

  # Virtual machines encrypt the way to their boot volume; bare metal has no hypervisor that could.
  is_pv_encryption_in_transit_enabled = startswith(each.value.shape, "VM.") ? true : null

  dynamic "shape_config" {
    for_each = endswith(each.value.shape, ".Flex") ? [local.shapes[each.value.shape]] : []
    content {
      # An OCPU is two of the catalogue's vCPUs.
      ocpus         = shape_config.value.vcpus / 2
      memory_in_gbs = shape_config.value.memory_gb
    }
  }

  source_details {
    source_type             = "image"
    source_id               = each.value.gpus > 0 ? var.image.gpu : var.image.cpu
    boot_volume_size_in_gbs = tostring(each.value.gpus > 0 ? var.disks.gpu_boot_gb : var.disks.cpu_boot_gb)
  }

  create_vnic_details {
    subnet_id        = contains(local.ingress_hosts, each.key) ? oci_core_subnet.ingress.id : oci_core_subnet.hosts.id
    assign_public_ip = tostring(contains(local.ingress_hosts, each.key))
    nsg_ids          = concat([oci_core_network_security_group.cluster.id], contains(local.ingress_hosts, each.key) ? [oci_core_network_security_group.ingress.id] : [])
  }

  instance_options {
    are_legacy_imds_endpoints_disabled = true
  }

  agent_config {
    are_all_plugins_disabled = false
    is_management_disabled   = false
    is_monitoring_disabled   = false

    dynamic "plugins_config" {
      for_each = local.shapes[each.value.shape].rdma ? local.rdma_plugins : []
      content {
        name          = plugins_config.value
        desired_state = "ENABLED"
      }
    }
  }
}

module "inventory" {
  source = "../inventory"
  nodes  = local.nodes
}

data "oci_core_images" "gpu" {
  for_each       = { for shape, row in local.shapes : shape => row if row.gpus > 0 }
  compartment_id = var.compartment_id
  shape          = each.key
}

# Only the live tenancy knows whether the image boots on the shape.
check "gpu_image_fits_shape" {
  assert {
    condition     = alltrue([for shape in keys(data.oci_core_images.gpu) : contains(data.oci_core_images.gpu[shape].images[*].id, var.image.gpu)])
    error_message = "image.gpu = ${var.image.gpu} is not listed for every GPU shape in use (${join(", ", keys(data.oci_core_images.gpu))}). Take an image that the compartment lists for them."
  }
}
