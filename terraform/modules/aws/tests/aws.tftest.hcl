# What went wrong before: EFA cards left unused, EFA blocked by a rule written with addresses, a capacity block asked for as an
# ordinary reservation.

mock_provider "aws" {
  mock_data "aws_ec2_instance_type" {
    defaults = { efa_maximum_interfaces = 32 }
  }
}

variables {
  name = "t"
  zone = "us-west-2b"
  pools = {
    decode  = { role = "decode", shape = "p6-b200.48xlarge", count = 2, reservation = "b200" }
    prefill = { role = "prefill", shape = "p5en.48xlarge", reservation = "h200" }
    router  = { role = "router", shape = "c7i.4xlarge", also = ["ingress"] }
  }
  reservations = {
    b200 = { id = "cr-0123456789abcdef0", kind = "capacity-block", ends_at = "2099-01-01T00:00:00Z", zone = "us-west-2b", shape = "p6-b200.48xlarge", count = 2 }
    h200 = { id = "cr-0fedcba9876543210", zone = "us-west-2b", shape = "p5en.48xlarge", count = 1 }
  }
  transport       = { library = "mooncake", protocol = "efa" }
  ssh_keys        = ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGV4YW1wbGVleGFtcGxlZXhhbXBsZWV4YW1wbGVleA ops"]
  allowed_clients = ["198.51.100.0/24"]
  admin_clients   = ["203.0.113.7/32"]
  image           = { gpu = "ami-0123456789abcdef0", cpu = "ami-0fedcba9876543210" }
}

# --- Valid

run "every_efa_card_is_used" {
  command = plan
  assert {
    condition     = length(aws_launch_template.pool["decode"].network_interfaces) == 9 && length(aws_launch_template.pool["prefill"].network_interfaces) == 17
    error_message = "one ordinary NIC and every EFA device: ${length(aws_launch_template.pool["decode"].network_interfaces)}"
  }
  assert {
    condition = jsonencode([for nic in aws_launch_template.pool["decode"].network_interfaces : [nic.network_card_index, nic.device_index, nic.interface_type]]) == jsonencode(
    concat([[0, 0, "interface"], [0, 1, "efa-only"]], [for card in range(1, 8) : [card, 0, "efa-only"]]))
    error_message = jsonencode([for nic in aws_launch_template.pool["decode"].network_interfaces : [nic.network_card_index, nic.device_index, nic.interface_type]])
  }
  assert {
    condition     = jsonencode([for nic in aws_launch_template.pool["router"].network_interfaces : nic.interface_type]) == jsonencode(["interface"])
    error_message = "a router host has one ordinary NIC"
  }
}

run "hosts_are_placed_as_their_reservation_was_made" {
  command = plan
  variables {
    pools = {
      decode  = { role = "decode", shape = "p6-b200.48xlarge", count = 2, reservation = "b200" }
      prefill = { role = "prefill", shape = "p5en.48xlarge", reservation = "h200" }
      more    = { role = "prefill", shape = "p5en.48xlarge", reservation = "loose" }
      tried   = { role = "prefill", shape = "p5.48xlarge" }
      router  = { role = "router", shape = "c7i.4xlarge", also = ["ingress"] }
    }
    reservations = {
      b200  = { id = "cr-0123456789abcdef0", kind = "capacity-block", ends_at = "2099-01-01T00:00:00Z", zone = "us-west-2b", shape = "p6-b200.48xlarge", count = 2 }
      h200  = { id = "cr-0fedcba9876543210", zone = "us-west-2b", shape = "p5en.48xlarge", count = 1, placement_group = "ours" }
      loose = { id = "cr-0fedcba9876543211", zone = "us-west-2b", shape = "p5en.48xlarge", count = 1 }
    }
    allow_unreserved = true
  }
  assert {
    condition     = aws_placement_group.fabric.strategy == "cluster" && jsonencode({ for pool, template in aws_launch_template.pool : pool => template.placement[*].group_name }) == jsonencode({ decode = [], more = [], prefill = ["ours"], router = [], tried = ["t-fabric"] })
    error_message = jsonencode({ for pool, template in aws_launch_template.pool : pool => template.placement[*].group_name })
  }
}

run "hosts_take_their_reservation" {
  command = plan
  assert {
    condition     = aws_launch_template.pool["decode"].instance_market_options[0].market_type == "capacity-block" && aws_launch_template.pool["decode"].capacity_reservation_specification[0].capacity_reservation_target[0].capacity_reservation_id == "cr-0123456789abcdef0"
    error_message = "a capacity block is taken as one"
  }
  assert {
    condition     = length(aws_launch_template.pool["prefill"].instance_market_options) == 0
    error_message = "an on-demand reservation is no capacity block"
  }
}

run "efa_traffic_is_let_through_by_group" {
  command = apply
  assert {
    condition     = aws_vpc_security_group_ingress_rule.cluster.ip_protocol == "-1" && aws_vpc_security_group_ingress_rule.cluster.referenced_security_group_id == aws_security_group.cluster.id && aws_vpc_security_group_egress_rule.cluster.referenced_security_group_id == aws_security_group.cluster.id
    error_message = "EFA needs all traffic from and to the group itself"
  }
}

run "private_and_hardened_by_default" {
  command = plan
  assert {
    condition     = alltrue([for pool in values(aws_launch_template.pool) : pool.metadata_options[0].http_tokens == "required" && pool.block_device_mappings[0].ebs[0].encrypted == "true"])
    error_message = "IMDSv2 and encrypted disks everywhere"
  }
  assert {
    condition     = jsonencode({ for name, pool in aws_launch_template.pool : name => pool.network_interfaces[0].associate_public_ip_address }) == jsonencode({ decode = "false", prefill = "false", router = "true" })
    error_message = "only the ingress has a public address"
  }
  assert {
    condition     = jsonencode([for rule in values(aws_vpc_security_group_ingress_rule.clients) : [rule.from_port, rule.to_port, rule.cidr_ipv4]]) == jsonencode([[443, 443, "198.51.100.0/24"]])
    error_message = "clients reach HTTPS and nothing else"
  }
  assert {
    condition     = length(aws_fsx_lustre_file_system.weights) == 0
    error_message = "no shared storage unless asked for"
  }
}

run "nodes_and_inventory" {
  command = apply
  assert {
    condition     = jsonencode({ for name, node in output.nodes : name => [node.role, node.gpus, node.shape] }) == jsonencode({ "t-decode-1" = ["decode", 8, "p6-b200.48xlarge"], "t-decode-2" = ["decode", 8, "p6-b200.48xlarge"], "t-prefill-1" = ["prefill", 8, "p5en.48xlarge"], "t-router-1" = ["router", 0, "c7i.4xlarge"] })
    error_message = jsonencode(output.nodes)
  }
  assert {
    condition     = output.inventory.ingress["t-router-1"].ansible_host == output.ingress_addresses[0] && strcontains(output.inventory.decode["t-decode-1"].ansible_ssh_common_args, "ProxyJump=ubuntu@${output.ingress_addresses[0]}")
    error_message = "hosts are entered through the ingress"
  }
}

run "shared_weights" {
  command = plan
  variables {
    weights = { storage_gib = 4800 }
  }
  assert {
    condition     = jsonencode(sort([for rule in values(aws_vpc_security_group_ingress_rule.weights) : "${rule.from_port}-${rule.to_port}"])) == jsonencode(["1018-1023", "988-988"])
    error_message = "Lustre's ports, from the hosts"
  }
  assert {
    condition     = aws_fsx_lustre_file_system.weights[0].efa_enabled && aws_fsx_lustre_file_system.weights[0].deployment_type == "PERSISTENT_2"
    error_message = "weights are read over EFA"
  }
}

run "shared_weights_without_efa" {
  command = plan
  variables {
    weights = { storage_gib = 1200, mib_per_s_per_tib = 250, efa = false }
  }
  assert {
    condition     = !aws_fsx_lustre_file_system.weights[0].efa_enabled && aws_fsx_lustre_file_system.weights[0].storage_capacity == 1200
    error_message = "small and slow is allowed where EFA is not asked for"
  }
}

run "gpu_hosts_are_protected" {
  command = plan
  assert {
    condition     = jsonencode({ for name, host in aws_instance.host : name => host.disable_api_termination }) == jsonencode({ "t-decode-1" = true, "t-decode-2" = true, "t-prefill-1" = true, "t-router-1" = false })
    error_message = "nobody ends a GPU host by mistake"
  }
}

run "protection_can_be_taken_off" {
  command = plan
  variables {
    protect = false
  }
  assert {
    condition     = !anytrue([for host in values(aws_instance.host) : host.disable_api_termination])
    error_message = "or the cluster could not be destroyed"
  }
}

run "no_way_out_unless_asked_for" {
  command = plan
  assert {
    condition     = length(aws_nat_gateway.hosts) == 0 && length(aws_route_table.hosts.route) == 0 && length(aws_vpc_security_group_egress_rule.packages) == 0
    error_message = "private hosts reach nothing outside"
  }
}

run "a_way_out_for_packages" {
  command = apply
  variables {
    nat = true
  }
  assert {
    condition     = jsonencode([for route in aws_route_table.hosts.route : [route.cidr_block, route.nat_gateway_id]]) == jsonencode([["0.0.0.0/0", aws_nat_gateway.hosts[0].id]]) && aws_route_table_association.hosts.subnet_id == aws_subnet.hosts.id
    error_message = jsonencode(aws_route_table.hosts.route)
  }
  assert {
    condition     = aws_nat_gateway.hosts[0].subnet_id == aws_subnet.ingress.id && aws_nat_gateway.hosts[0].allocation_id == aws_eip.nat[0].id
    error_message = "the gateway stands in the public subnet"
  }
  assert {
    condition     = jsonencode(sort([for rule in values(aws_vpc_security_group_egress_rule.packages) : "${rule.ip_protocol} ${rule.from_port}-${rule.to_port}"])) == jsonencode(["tcp 443-443", "tcp 80-80"])
    error_message = "packages come over HTTP and HTTPS, nothing else leaves"
  }
  assert {
    condition     = jsonencode({ for name, pool in aws_launch_template.pool : name => pool.network_interfaces[0].associate_public_ip_address }) == jsonencode({ decode = "false", prefill = "false", router = "true" })
    error_message = "hosts stay private"
  }
}

# --- Invalid, one thing at a time

run "capacity_block_in_a_placement_group" {
  command = plan
  variables {
    reservations = { b200 = { id = "cr-0123456789abcdef0", kind = "capacity-block", ends_at = "2099-01-01T00:00:00Z", placement_group = "ours", zone = "us-west-2b", shape = "p6-b200.48xlarge", count = 2 }, h200 = { id = "cr-0fedcba9876543210", zone = "us-west-2b", shape = "p5en.48xlarge", count = 1 } }
  }
  expect_failures = [var.reservations]
}

run "too_small_for_efa" {
  command = plan
  variables {
    weights = { storage_gib = 4800, mib_per_s_per_tib = 500 }
  }
  expect_failures = [var.weights]
}

run "zone_is_a_region" {
  command = plan
  variables {
    zone = "us-west-2"
  }
  expect_failures = [var.zone]
}

run "reservation_is_a_block_offering" {
  command = plan
  variables {
    reservations = { b200 = { id = "cb-0123456789abcdef0", zone = "us-west-2b", shape = "p6-b200.48xlarge", count = 2 }, h200 = { id = "cr-0fedcba9876543210", zone = "us-west-2b", shape = "p5en.48xlarge", count = 1 } }
  }
  expect_failures = [var.reservations]
}

run "capacity_block_without_end" {
  command = plan
  variables {
    reservations = { b200 = { id = "cr-0123456789abcdef0", kind = "capacity-block", zone = "us-west-2b", shape = "p6-b200.48xlarge", count = 2 }, h200 = { id = "cr-0fedcba9876543210", zone = "us-west-2b", shape = "p5en.48xlarge", count = 1 } }
  }
  expect_failures = [var.reservations]
}

run "unknown_reservation_kind" {
  command = plan
  variables {
    reservations = { b200 = { id = "cr-0123456789abcdef0", kind = "spot", zone = "us-west-2b", shape = "p6-b200.48xlarge", count = 2 }, h200 = { id = "cr-0fedcba9876543210", zone = "us-west-2b", shape = "p5en.48xlarge", count = 1 } }
  }
  expect_failures = [var.reservations]
}

run "image_is_a_name" {
  command = plan
  variables {
    image = { gpu = "ubuntu-24.04", cpu = "ami-0fedcba9876543210" }
  }
  expect_failures = [var.image]
}

run "nobody_can_log_in" {
  command = plan
  variables {
    ssh_keys = []
  }
  expect_failures = [var.ssh_keys]
}

run "nobody_can_call" {
  command = plan
  variables {
    allowed_clients = []
  }
  expect_failures = [var.allowed_clients]
}

run "disk_too_small" {
  command = plan
  variables {
    disks = { gpu_boot_gb = 20 }
  }
  expect_failures = [var.disks]
}

run "odd_storage_size" {
  command = plan
  variables {
    weights = { storage_gib = 1000 }
  }
  expect_failures = [var.weights]
}

run "odd_storage_speed" {
  command = plan
  variables {
    weights = { storage_gib = 2400, mib_per_s_per_tib = 300 }
  }
  expect_failures = [var.weights]
}

# A region that offers less than the catalogue says. The data source is read while planning, so this needs no live cloud.
run "region_reports_fewer_cards" {
  command = plan
  override_data {
    target = data.aws_ec2_instance_type.shape
    values = { efa_maximum_interfaces = 4 }
  }
  expect_failures = [check.region_offers_what_the_catalogue_says]
}
