# What went wrong before: RDMA NICs in an ordinary VPC, seven rails of eight, hosts that live-migrate.

mock_provider "google" {
  mock_data "google_compute_machine_types" {
    defaults = { machine_types = [{ guest_cpus = 224 }] }
  }
}

variables {
  name = "t"
  zone = "us-central1-b"
  pools = {
    decode  = { role = "decode", shape = "a4-highgpu-8g", count = 2, reservation = "b200" }
    prefill = { role = "prefill", shape = "a3-ultragpu-8g", reservation = "h200" }
    router  = { role = "router", shape = "c4-standard-16", also = ["ingress"] }
  }
  reservations = {
    b200 = { id = "b200", zone = "us-central1-b", shape = "a4-highgpu-8g", count = 2 }
    h200 = { id = "projects/shared/reservations/h200", zone = "us-central1-b", shape = "a3-ultragpu-8g", count = 1 }
  }
  transport       = { library = "mooncake", protocol = "rdma" }
  ssh_keys        = ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGV4YW1wbGVleGFtcGxlZXhhbXBsZWV4YW1wbGVleA ops"]
  allowed_clients = ["198.51.100.0/24"]
  admin_clients   = ["203.0.113.7/32"]
  image           = { gpu = "my-project/gpu", cpu = "ubuntu-os-cloud/ubuntu-2404-lts-amd64" }
  project         = "my-project"
}

# --- Valid

run "eight_rails_on_the_zones_rdma_profile" {
  command = plan
  assert {
    condition     = google_compute_network.fabric.network_profile == "projects/my-project/global/networkProfiles/us-central1-b-vpc-roce" && google_compute_network.fabric.mtu == 8896
    error_message = "${google_compute_network.fabric.network_profile} ${google_compute_network.fabric.mtu}"
  }
  assert {
    condition     = jsonencode(google_compute_subnetwork.rail[*].ip_cidr_range) == jsonencode([for rail in range(8) : "10.96.${rail * 32}.0/19"])
    error_message = jsonencode(google_compute_subnetwork.rail[*].ip_cidr_range)
  }
}

run "ten_nics_in_order" {
  command = plan
  assert {
    condition     = jsonencode(google_compute_instance.host["t-decode-1"].network_interface[*].nic_type) == jsonencode(concat(["GVNIC", "GVNIC"], [for rail in range(8) : "MRDMA"]))
    error_message = jsonencode(google_compute_instance.host["t-decode-1"].network_interface[*].nic_type)
  }
  assert {
    condition     = jsonencode(google_compute_instance.host["t-router-1"].network_interface[*].nic_type) == jsonencode(["GVNIC"])
    error_message = "a router host has one ordinary NIC"
  }
}

run "hosts_take_their_reservation_and_sit_together" {
  command = plan
  assert {
    condition     = google_compute_instance.host["t-decode-1"].scheduling[0].provisioning_model == "RESERVATION_BOUND" && google_compute_instance.host["t-decode-1"].scheduling[0].on_host_maintenance == "TERMINATE" && google_compute_instance.host["t-router-1"].scheduling[0].provisioning_model == "STANDARD"
    error_message = "GPU hosts are bound to their reservation and cannot be moved"
  }
  assert {
    condition     = google_compute_instance.host["t-prefill-1"].reservation_affinity[0].specific_reservation[0].values[0] == "projects/shared/reservations/h200"
    error_message = jsonencode(google_compute_instance.host["t-prefill-1"].reservation_affinity)
  }
  assert {
    condition     = jsonencode({ for shape, policy in google_compute_resource_policy.fabric : shape => policy.group_placement_policy[0].collocation }) == jsonencode({ "a3-ultragpu-8g" = "COLLOCATED", "a4-highgpu-8g" = "COLLOCATED" }) && length(google_compute_instance.host["t-router-1"].resource_policies) == 0
    error_message = "the placement policy is for GPU hosts"
  }
}

run "private_and_hardened_by_default" {
  command = plan
  assert {
    condition     = jsonencode({ for name, host in google_compute_instance.host : name => length(host.network_interface[0].access_config) }) == jsonencode({ "t-decode-1" = 0, "t-decode-2" = 0, "t-prefill-1" = 0, "t-router-1" = 1 })
    error_message = "only the ingress has a public address"
  }
  assert {
    condition     = jsonencode(google_compute_firewall.clients.source_ranges) == jsonencode(["198.51.100.0/24"]) && jsonencode([for allow in google_compute_firewall.clients.allow : allow.ports]) == jsonencode([["443"]])
    error_message = "clients reach HTTPS and nothing else"
  }
  assert {
    condition     = alltrue([for host in values(google_compute_instance.host) : length(host.service_account) == 0 && host.metadata["block-project-ssh-keys"] == "true"])
    error_message = "no service account, no keys but ours"
  }
}

run "nodes_and_inventory" {
  command = apply
  assert {
    condition     = jsonencode({ for name, node in output.nodes : name => [node.role, node.gpus, node.shape] }) == jsonencode({ "t-decode-1" = ["decode", 8, "a4-highgpu-8g"], "t-decode-2" = ["decode", 8, "a4-highgpu-8g"], "t-prefill-1" = ["prefill", 8, "a3-ultragpu-8g"], "t-router-1" = ["router", 0, "c4-standard-16"] })
    error_message = jsonencode(output.nodes)
  }
  assert {
    condition     = output.nodes["t-decode-1"].fabric_address == google_compute_instance.host["t-decode-1"].network_interface[2].network_ip && output.nodes["t-router-1"].fabric_address == null
    error_message = "handoffs arrive at the first RDMA NIC"
  }
}

run "gpu_hosts_are_protected" {
  command = plan
  assert {
    condition     = jsonencode({ for name, host in google_compute_instance.host : name => host.deletion_protection }) == jsonencode({ "t-decode-1" = true, "t-decode-2" = true, "t-prefill-1" = true, "t-router-1" = false })
    error_message = "nobody deletes a GPU host by mistake"
  }
}

run "protection_can_be_taken_off" {
  command = plan
  variables {
    protect = false
  }
  assert {
    condition     = !anytrue([for host in values(google_compute_instance.host) : host.deletion_protection])
    error_message = "or the cluster could not be destroyed"
  }
}

run "no_way_out_unless_asked_for" {
  command = plan
  assert {
    condition     = length(google_compute_router.hosts) == 0 && length(google_compute_router_nat.hosts) == 0
    error_message = "private hosts reach nothing outside"
  }
}

run "a_way_out_for_packages" {
  command = plan
  variables {
    nat = true
  }
  assert {
    condition     = google_compute_router_nat.hosts[0].source_subnetwork_ip_ranges_to_nat == "LIST_OF_SUBNETWORKS" && length(google_compute_router_nat.hosts[0].subnetwork) == 1
    error_message = "the first NIC's subnet and no other"
  }
  assert {
    condition     = alltrue([for name, host in google_compute_instance.host : length(host.network_interface[0].access_config) == (name == "t-router-1" ? 1 : 0)])
    error_message = "hosts stay private"
  }
}

# --- Invalid, one thing at a time

run "zone_is_a_region" {
  command = plan
  variables {
    zone = "us-central1"
  }
  expect_failures = [var.zone]
}

run "reservation_is_a_link" {
  command = plan
  variables {
    reservations = { b200 = { id = "https://example/b200", zone = "us-central1-b", shape = "a4-highgpu-8g", count = 2 }, h200 = { id = "h200", zone = "us-central1-b", shape = "a3-ultragpu-8g", count = 1 } }
  }
  expect_failures = [var.reservations]
}

run "profile_of_another_zone" {
  command = plan
  variables {
    network_profile = "us-east4-b-vpc-roce"
  }
  expect_failures = [var.network_profile]
}

run "profile_is_not_roce" {
  command = plan
  variables {
    network_profile = "us-central1-b-vpc-falcon"
  }
  expect_failures = [var.network_profile]
}

run "project_is_a_number" {
  command = plan
  variables {
    project = "123456789012"
  }
  expect_failures = [var.project]
}

run "image_without_project" {
  command = plan
  variables {
    image = { gpu = "ubuntu", cpu = "ubuntu-os-cloud/ubuntu-2404-lts-amd64" }
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

# A zone that does not offer the shape. The data source is read while planning, so this needs no live cloud.
run "zone_does_not_offer_the_shape" {
  command = plan
  override_data {
    target = data.google_compute_machine_types.zone["a4-highgpu-8g"]
    values = { machine_types = [] }
  }
  expect_failures = [check.zone_offers_the_shapes]
}
