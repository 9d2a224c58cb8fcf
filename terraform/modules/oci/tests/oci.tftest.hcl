# What went wrong before: RDMA NICs without addresses because the agent's plugins were off, hosts outside the compute cluster.

mock_provider "oci" {
  mock_data "oci_core_images" {
    defaults = { images = [{ id = "ocid1.image.oc1..GPU" }] }
  }
  mock_data "oci_core_cluster_network_instances" {
    defaults = { instances = [{ id = "ocid1.instance.oc1..c" }, { id = "ocid1.instance.oc1..a" }, { id = "ocid1.instance.oc1..b" }] }
  }
}

variables {
  name = "t"
  zone = "abcD:US-CHICAGO-1-AD-1"
  pools = {
    decode  = { role = "decode", shape = "BM.GPU.B200.8", count = 2, reservation = "b200" }
    prefill = { role = "prefill", shape = "BM.GPU.H200.8", reservation = "h200" }
    router  = { role = "router", shape = "VM.Standard.E5.Flex", also = ["ingress"] }
  }
  reservations = {
    b200 = { id = "ocid1.capacityreservation.oc1..b", zone = "abcD:US-CHICAGO-1-AD-1", shape = "BM.GPU.B200.8", count = 2 }
    h200 = { id = "ocid1.capacityreservation.oc1..h", zone = "abcD:US-CHICAGO-1-AD-1", shape = "BM.GPU.H200.8", count = 1 }
  }
  transport       = { library = "nixl", protocol = "UCX" }
  ssh_keys        = ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGV4YW1wbGVleGFtcGxlZXhhbXBsZWV4YW1wbGVleA ops"]
  allowed_clients = ["198.51.100.0/24"]
  admin_clients   = ["203.0.113.7/32"]
  image           = { gpu = "ocid1.image.oc1..GPU", cpu = "ocid1.image.oc1..CPU" }
  compartment_id  = "ocid1.compartment.oc1..c"
}

# --- Valid

run "fabric_hosts_share_the_compute_cluster" {
  command = apply
  assert {
    condition     = jsonencode({ for name, host in oci_core_instance.host : name => host.compute_cluster_id == oci_core_compute_cluster.fabric[0].id }) == jsonencode({ "t-decode-1" = true, "t-decode-2" = true, "t-prefill-1" = true, "t-router-1" = false })
    error_message = "GPU hosts belong in the compute cluster, others do not"
  }
}

run "agent_brings_up_the_fabric" {
  command = plan
  assert {
    condition     = jsonencode(oci_core_instance.host["t-decode-1"].agent_config[0].plugins_config) == jsonencode([for name in ["Compute HPC RDMA Authentication", "Compute HPC RDMA Auto-Configuration", "Compute RDMA GPU Monitoring"] : { desired_state = "ENABLED", name = name }])
    error_message = jsonencode(oci_core_instance.host["t-decode-1"].agent_config[0].plugins_config)
  }
  assert {
    condition     = length(oci_core_instance.host["t-router-1"].agent_config[0].plugins_config) == 0
    error_message = "a router host has no fabric"
  }
}

run "reservation_and_size" {
  command = plan
  assert {
    condition     = oci_core_instance.host["t-decode-1"].capacity_reservation_id == "ocid1.capacityreservation.oc1..b" && oci_core_instance.host["t-router-1"].shape_config[0].ocpus == 8
    error_message = "GPU hosts take their reservation; a flexible shape gets the catalogue's size"
  }
}

run "private_and_hardened_by_default" {
  command = plan
  assert {
    condition     = jsonencode({ for name, host in oci_core_instance.host : name => host.create_vnic_details[0].assign_public_ip }) == jsonencode({ "t-decode-1" = "false", "t-decode-2" = "false", "t-prefill-1" = "false", "t-router-1" = "true" })
    error_message = "only the ingress has a public address"
  }
  assert {
    condition     = oci_core_subnet.hosts.prohibit_public_ip_on_vnic && oci_core_subnet.hosts.prohibit_internet_ingress && alltrue([for host in values(oci_core_instance.host) : host.instance_options[0].are_legacy_imds_endpoints_disabled])
    error_message = "private subnet, no legacy metadata service"
  }
  assert {
    condition     = jsonencode([for rule in values(oci_core_network_security_group_security_rule.ingress) : [rule.source, rule.tcp_options[0].destination_port_range[0].min]]) == jsonencode([["198.51.100.0/24", 443], ["203.0.113.7/32", 22]])
    error_message = "clients reach HTTPS, operators SSH, nothing else"
  }
}

run "nodes_and_inventory" {
  command = apply
  assert {
    condition     = jsonencode({ for name, node in output.nodes : name => [node.role, node.gpus, node.shape] }) == jsonencode({ "t-decode-1" = ["decode", 8, "BM.GPU.B200.8"], "t-decode-2" = ["decode", 8, "BM.GPU.B200.8"], "t-prefill-1" = ["prefill", 8, "BM.GPU.H200.8"], "t-router-1" = ["router", 0, "VM.Standard.E5.Flex"] })
    error_message = jsonencode(output.nodes)
  }
}

run "security_groups_alone_decide" {
  command = apply
  assert {
    condition     = length(oci_core_security_list.none.ingress_security_rules) == 0 && length(oci_core_security_list.none.egress_security_rules) == 0 && jsonencode([oci_core_subnet.hosts.security_list_ids, oci_core_subnet.ingress.security_list_ids]) == jsonencode([[oci_core_security_list.none.id], [oci_core_security_list.none.id]])
    error_message = "the VCN's own list lets SSH in from everywhere"
  }
}

run "no_way_out_unless_asked_for" {
  command = plan
  assert {
    condition     = length(oci_core_nat_gateway.hosts) == 0 && length(oci_core_route_table.hosts.route_rules) == 0 && length(oci_core_network_security_group_security_rule.packages) == 0
    error_message = "private hosts reach nothing outside"
  }
}

run "a_way_out_for_packages" {
  command = apply
  variables {
    nat = true
  }
  assert {
    condition     = jsonencode([for rule in oci_core_route_table.hosts.route_rules : [rule.destination, rule.network_entity_id]]) == jsonencode([["0.0.0.0/0", oci_core_nat_gateway.hosts[0].id]])
    error_message = jsonencode(oci_core_route_table.hosts.route_rules)
  }
  assert {
    condition     = jsonencode(sort([for rule in values(oci_core_network_security_group_security_rule.packages) : "${rule.direction} ${rule.protocol} ${rule.tcp_options[0].destination_port_range[0].min}"])) == jsonencode(["EGRESS 6 443", "EGRESS 6 80"])
    error_message = "packages come over HTTP and HTTPS, nothing else leaves"
  }
}

run "a_cluster_network_holds_the_hosts_that_hand_off" {
  command = apply
  variables {
    fabric = "cluster-network"
    pools = {
      decode  = { role = "decode", shape = "BM.GPU.B200.8", count = 2, reservation = "b200" }
      prefill = { role = "prefill", shape = "BM.GPU.B200.8", reservation = "b200" }
      router  = { role = "router", shape = "VM.Standard.E5.Flex", also = ["ingress"] }
    }
    reservations = {
      b200 = { id = "ocid1.capacityreservation.oc1..b", zone = "abcD:US-CHICAGO-1-AD-1", shape = "BM.GPU.B200.8", count = 3 }
    }
  }
  assert {
    condition     = oci_core_cluster_network.fabric[0].instance_pools[0].size == 3 && length(oci_core_compute_cluster.fabric) == 0 && jsonencode(keys(oci_core_instance.host)) == jsonencode(["t-router-1"])
    error_message = "three hosts in one pool, the router outside of it"
  }
  assert {
    condition     = oci_core_instance_configuration.fabric[0].instance_details[0].launch_details[0].shape == "BM.GPU.B200.8" && oci_core_instance_configuration.fabric[0].instance_details[0].launch_details[0].capacity_reservation_id == "ocid1.capacityreservation.oc1..b" && length(oci_core_instance_configuration.fabric[0].instance_details[0].launch_details[0].agent_config[0].plugins_config) == 3
    error_message = jsonencode(oci_core_instance_configuration.fabric[0].instance_details)
  }
  assert {
    condition     = jsonencode({ for name, instance in data.oci_core_instance.networked : name => instance.instance_id }) == jsonencode({ "t-decode-1" = "ocid1.instance.oc1..a", "t-decode-2" = "ocid1.instance.oc1..b", "t-prefill-1" = "ocid1.instance.oc1..c" })
    error_message = jsonencode({ for name, instance in data.oci_core_instance.networked : name => instance.instance_id })
  }
  assert {
    condition     = jsonencode({ for name, node in output.nodes : name => node.role }) == jsonencode({ "t-decode-1" = "decode", "t-decode-2" = "decode", "t-prefill-1" = "prefill", "t-router-1" = "router" }) && output.nodes["t-decode-1"].address == data.oci_core_instance.networked["t-decode-1"].private_ip
    error_message = jsonencode(output.nodes)
  }
}

# --- Invalid, one thing at a time

run "unknown_fabric" {
  command = plan
  variables {
    fabric = "infiniband"
  }
  expect_failures = [var.fabric]
}

run "two_shapes_in_a_cluster_network" {
  command = plan
  variables {
    fabric = "cluster-network"
  }
  expect_failures = [oci_core_instance_configuration.fabric]
}

run "two_reservations_in_a_cluster_network" {
  command = plan
  variables {
    fabric = "cluster-network"
    pools = {
      decode  = { role = "decode", shape = "BM.GPU.B200.8", count = 2, reservation = "b200" }
      prefill = { role = "prefill", shape = "BM.GPU.B200.8", reservation = "more" }
      router  = { role = "router", shape = "VM.Standard.E5.Flex", also = ["ingress"] }
    }
    reservations = {
      b200 = { id = "ocid1.capacityreservation.oc1..b", zone = "abcD:US-CHICAGO-1-AD-1", shape = "BM.GPU.B200.8", count = 2 }
      more = { id = "ocid1.capacityreservation.oc1..m", zone = "abcD:US-CHICAGO-1-AD-1", shape = "BM.GPU.B200.8", count = 1 }
    }
  }
  expect_failures = [oci_core_instance_configuration.fabric]
}

run "zone_is_a_region" {
  command = plan
  variables {
    zone = "us-chicago-1"
  }
  expect_failures = [var.zone]
}

run "reservation_is_an_instance" {
  command = plan
  variables {
    reservations = { b200 = { id = "ocid1.instance.oc1..b", zone = "abcD:US-CHICAGO-1-AD-1", shape = "BM.GPU.B200.8", count = 2 }, h200 = { id = "ocid1.capacityreservation.oc1..h", zone = "abcD:US-CHICAGO-1-AD-1", shape = "BM.GPU.H200.8", count = 1 } }
  }
  expect_failures = [var.reservations]
}

run "compartment_is_a_user" {
  command = plan
  variables {
    compartment_id = "ocid1.user.oc1..u"
  }
  expect_failures = [var.compartment_id]
}

run "image_is_a_name" {
  command = plan
  variables {
    image = { gpu = "Ubuntu 24.04", cpu = "ocid1.image.oc1..CPU" }
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

# An image that the compartment does not list for the shape.
run "image_does_not_fit" {
  command = plan
  override_data {
    target = data.oci_core_images.gpu
    values = { images = [{ id = "ocid1.image.oc1..OTHER" }] }
  }
  expect_failures = [check.gpu_image_fits_shape]
}
