module "fleet" {
  source = "../fleet"

  name             = var.name
  provider_name    = "aws"
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
      "network.vpc_cidr"     = { cidr = var.network.vpc_cidr }
      "network.host_cidr"    = { cidr = var.network.host_cidr, within = "network.vpc_cidr", hosts = sum([for pool in values(var.pools) : pool.count]) }
      "network.ingress_cidr" = { cidr = var.network.ingress_cidr, within = "network.vpc_cidr", hosts = sum(concat([0], [for pool in values(var.pools) : pool.count if pool.role == "ingress" || contains(pool.also, "ingress")])) }
    },
    { for name, cidr in var.network.peers : "network.peers.${name}" => { cidr = cidr } },
  )
}

locals {
  hosts         = module.fleet.hosts
  shapes        = module.fleet.shapes
  ingress_hosts = [for name, host in local.hosts : name if host.role == "ingress" || contains(host.also, "ingress")]

  tags = { cluster = var.name }

  addresses        = { for name, instance in aws_instance.host : name => instance.private_ip }
  public_addresses = { for name in local.ingress_hosts : name => aws_instance.host[name].public_ip }
  # EFA addresses hosts by device, over the same private address.
  fabric_addresses = { for name in keys(local.hosts) : name => null }

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

resource "aws_vpc" "cluster" {
  #checkov:skip=CKV2_AWS_12:no interface is in the default group: each names its own
  #checkov:skip=CKV2_AWS_11:flow logs need a log group and a role of the site; they belong to the account
  cidr_block           = var.network.vpc_cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = merge(local.tags, { Name = var.name })
}

resource "aws_subnet" "hosts" {
  vpc_id                  = aws_vpc.cluster.id
  availability_zone       = var.zone
  cidr_block              = var.network.host_cidr
  map_public_ip_on_launch = false
  tags                    = merge(local.tags, { Name = "${var.name}-hosts" })
}

resource "aws_subnet" "ingress" {
  vpc_id                  = aws_vpc.cluster.id
  availability_zone       = var.zone
  cidr_block              = var.network.ingress_cidr
  map_public_ip_on_launch = false
  tags                    = merge(local.tags, { Name = "${var.name}-ingress" })
}

resource "aws_internet_gateway" "ingress" {
  vpc_id = aws_vpc.cluster.id
  tags   = merge(local.tags, { Name = var.name })
}

resource "aws_route_table" "ingress" {
  vpc_id = aws_vpc.cluster.id
  tags   = merge(local.tags, { Name = "${var.name}-ingress" })

  route {
    cidr_block = "0.0.0.0/0"
    gateway_id = aws_internet_gateway.ingress.id
  }
}

resource "aws_route_table_association" "ingress" {
  subnet_id      = aws_subnet.ingress.id
  route_table_id = aws_route_table.ingress.id
}

# Without `nat` this table leads nowhere but inside: hosts install from a bundle (bin/bundle).
resource "aws_route_table" "hosts" {
  vpc_id = aws_vpc.cluster.id
  tags   = merge(local.tags, { Name = "${var.name}-hosts" })

  dynamic "route" {
    for_each = aws_nat_gateway.hosts[*].id
    content {
      cidr_block     = "0.0.0.0/0"
      nat_gateway_id = route.value
    }
  }
}

resource "aws_route_table_association" "hosts" {
  subnet_id      = aws_subnet.hosts.id
  route_table_id = aws_route_table.hosts.id
}

resource "aws_eip" "nat" {
  #checkov:skip=CKV2_AWS_19:it belongs to the NAT gateway
  count = var.nat ? 1 : 0

  domain = "vpc"
  tags   = merge(local.tags, { Name = "${var.name}-nat" })
}

resource "aws_nat_gateway" "hosts" {
  count = var.nat ? 1 : 0

  allocation_id = aws_eip.nat[0].id
  subnet_id     = aws_subnet.ingress.id
  tags          = merge(local.tags, { Name = "${var.name}-hosts" })
  depends_on    = [aws_internet_gateway.ingress]
}

resource "aws_security_group" "cluster" {
  name                   = "${var.name}-cluster"
  description            = "Everything between hosts of the cluster, nothing else"
  vpc_id                 = aws_vpc.cluster.id
  revoke_rules_on_delete = true
  tags                   = merge(local.tags, { Name = "${var.name}-cluster" })
}

# EFA needs all traffic to and from the group itself, both ways, by group: a rule by address does not count.
resource "aws_vpc_security_group_ingress_rule" "cluster" {
  security_group_id            = aws_security_group.cluster.id
  description                  = "All traffic between hosts (EFA)"
  ip_protocol                  = "-1"
  referenced_security_group_id = aws_security_group.cluster.id
}

resource "aws_vpc_security_group_egress_rule" "cluster" {
  security_group_id            = aws_security_group.cluster.id
  description                  = "All traffic between hosts (EFA)"
  ip_protocol                  = "-1"
  referenced_security_group_id = aws_security_group.cluster.id
}

resource "aws_vpc_security_group_egress_rule" "packages" {
  for_each = var.nat ? toset(["80", "443"]) : toset([])

  security_group_id = aws_security_group.cluster.id
  description       = "Packages, through the NAT gateway"
  ip_protocol       = "tcp"
  from_port         = tonumber(each.value)
  to_port           = tonumber(each.value)
  cidr_ipv4         = "0.0.0.0/0"
}

resource "aws_security_group" "ingress" {
  name                   = "${var.name}-ingress"
  description            = "HTTPS from clients, SSH from operators, to the ingress hosts"
  vpc_id                 = aws_vpc.cluster.id
  revoke_rules_on_delete = true
  tags                   = merge(local.tags, { Name = "${var.name}-ingress" })
}

resource "aws_vpc_security_group_ingress_rule" "clients" {
  for_each = toset(var.allowed_clients)

  security_group_id = aws_security_group.ingress.id
  description       = "HTTPS from a client network"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = each.value
}

resource "aws_vpc_security_group_ingress_rule" "admins" {
  for_each = toset(var.admin_clients)

  security_group_id = aws_security_group.ingress.id
  description       = "SSH from an operators' network"
  ip_protocol       = "tcp"
  from_port         = 22
  to_port           = 22
  cidr_ipv4         = each.value
}

# For hosts without a reservation; the others are placed as their reservation was made.
resource "aws_placement_group" "fabric" {
  name     = "${var.name}-fabric"
  strategy = "cluster"
  tags     = local.tags
}

locals {
  # The primary NIC is an ordinary one, card 0 carries an EFA device beside it, every further card one of its own.
  nics = {
    for pool, spec in var.pools : pool => concat(
      [{ card = 0, device = 0, type = "interface" }],
      [for card in range(local.shapes[spec.shape].rdma_nics) : { card = card, device = card == 0 ? 1 : 0, type = "efa-only" }],
    )
  }
  # Capacity blocks are placed together by AWS and refuse a placement group; a reservation made inside one is taken only by
  # hosts that name that very group, and one made outside of any by hosts that name none.
  placement_groups = {
    for pool, spec in var.pools : pool =>
    !local.shapes[spec.shape].rdma ? null : spec.reservation == null ? aws_placement_group.fabric.name : var.reservations[spec.reservation].placement_group
  }
  pool_is_ingress = { for pool, spec in var.pools : pool => spec.role == "ingress" || contains(spec.also, "ingress") }
}

resource "aws_launch_template" "pool" {
  for_each = var.pools

  name                   = "${var.name}-${each.key}"
  image_id               = local.shapes[each.value.shape].gpus > 0 ? var.image.gpu : var.image.cpu
  instance_type          = each.value.shape
  update_default_version = true
  tags                   = local.tags

  # Public keys only: nothing in here is a secret.
  user_data = base64encode("#cloud-config\n${yamlencode({ ssh_authorized_keys = var.ssh_keys })}")

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  monitoring {
    enabled = true
  }

  block_device_mappings {
    device_name = "/dev/sda1"
    ebs {
      encrypted             = "true"
      delete_on_termination = "true"
      volume_type           = "gp3"
      volume_size           = local.shapes[each.value.shape].gpus > 0 ? var.disks.gpu_boot_gb : var.disks.cpu_boot_gb
    }
  }

  dynamic "network_interfaces" {
    for_each = local.nics[each.key]
    content {
      network_card_index          = network_interfaces.value.card
      device_index                = network_interfaces.value.device
      interface_type              = network_interfaces.value.type
      delete_on_termination       = "true"
      associate_public_ip_address = network_interfaces.key == 0 ? tostring(local.pool_is_ingress[each.key]) : null
      subnet_id                   = local.pool_is_ingress[each.key] ? aws_subnet.ingress.id : aws_subnet.hosts.id
      security_groups             = concat([aws_security_group.cluster.id], local.pool_is_ingress[each.key] ? [aws_security_group.ingress.id] : [])
    }
  }

  dynamic "placement" {
    for_each = local.placement_groups[each.key] == null ? [] : [local.placement_groups[each.key]]
    content {
      group_name = placement.value
    }
  }

  dynamic "capacity_reservation_specification" {
    for_each = each.value.reservation == null ? [] : [var.reservations[each.value.reservation].id]
    content {
      capacity_reservation_preference = "capacity-reservations-only"
      capacity_reservation_target {
        capacity_reservation_id = capacity_reservation_specification.value
      }
    }
  }

  dynamic "instance_market_options" {
    for_each = each.value.reservation == null ? [] : [for kind in [var.reservations[each.value.reservation].kind] : kind if kind == "capacity-block"]
    content {
      market_type = instance_market_options.value
    }
  }
}

resource "aws_instance" "host" {
  #checkov:skip=CKV_AWS_8:disks are encrypted in the launch template
  #checkov:skip=CKV_AWS_79:IMDSv2 is required in the launch template
  #checkov:skip=CKV_AWS_126:detailed monitoring is on in the launch template
  #checkov:skip=CKV_AWS_135:these instance types are EBS-optimized always
  #checkov:skip=CKV2_AWS_41:hosts call no AWS interface, so they have no role
  for_each = local.hosts

  launch_template {
    id      = aws_launch_template.pool[each.value.pool].id
    version = aws_launch_template.pool[each.value.pool].latest_version
  }
  disable_api_termination = var.protect && each.value.gpus > 0
  tags                    = merge(local.tags, { Name = each.key, role = each.value.role })
}

resource "aws_security_group" "weights" {
  count = var.weights == null ? 0 : 1

  name                   = "${var.name}-weights"
  description            = "Lustre between the weights' file system and the hosts"
  vpc_id                 = aws_vpc.cluster.id
  revoke_rules_on_delete = true
  tags                   = merge(local.tags, { Name = "${var.name}-weights" })
}

resource "aws_vpc_security_group_ingress_rule" "weights" {
  for_each = var.weights == null ? {} : { lustre = [988, 988], clients = [1018, 1023] }

  security_group_id            = aws_security_group.weights[0].id
  description                  = "Lustre from the hosts"
  ip_protocol                  = "tcp"
  from_port                    = each.value[0]
  to_port                      = each.value[1]
  referenced_security_group_id = aws_security_group.cluster.id
}

resource "aws_fsx_lustre_file_system" "weights" {
  #checkov:skip=CKV_AWS_190:encrypted with the account's key; the weights are no secret
  count = var.weights == null ? 0 : 1

  subnet_ids                  = [aws_subnet.hosts.id]
  deployment_type             = "PERSISTENT_2"
  storage_type                = "SSD"
  storage_capacity            = var.weights.storage_gib
  per_unit_storage_throughput = var.weights.mib_per_s_per_tib
  efa_enabled                 = var.weights.efa
  security_group_ids          = [aws_security_group.cluster.id, aws_security_group.weights[0].id]
  tags                        = merge(local.tags, { Name = "${var.name}-weights" })

  metadata_configuration {
    mode = "AUTOMATIC"
  }
}

module "inventory" {
  source = "../inventory"
  nodes  = local.nodes
}

data "aws_ec2_instance_type" "shape" {
  for_each      = local.shapes
  instance_type = each.key
}

# Only a live region knows: does the shape it offers have the NICs the catalogue promises?
check "region_offers_what_the_catalogue_says" {
  assert {
    condition = alltrue([
      for shape, row in local.shapes : row.rdma_nics == 0 || try(data.aws_ec2_instance_type.shape[shape].efa_maximum_interfaces >= row.rdma_nics, false)
    ])
    error_message = format("%s: the region reports fewer EFA interfaces than terraform/modules/catalog. Correct the catalogue, or choose another region.", join(", ", [
      for shape, row in local.shapes : "${shape} (${try(data.aws_ec2_instance_type.shape[shape].efa_maximum_interfaces, "none")} of ${row.rdma_nics})"
      if row.rdma_nics > 0 && !try(data.aws_ec2_instance_type.shape[shape].efa_maximum_interfaces >= row.rdma_nics, false)
    ]))
  }
}
